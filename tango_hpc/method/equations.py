"""The equations of RL Tango (arXiv 2505.15034, Section 3), one pure function each, numbered as in the paper.

Shape suffixes: `base.types`; T may have any leading shape.

The functions on log-probabilities take torch tensors and are differentiable; everything about rewards and
advantages takes and returns NumPy arrays in float64, so that reading and re-scoring rollouts needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tango_hpc.base.types import AlphaSchedule, ClassWeighting

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float64]
AVERAGES = ("response", "token", "constant")  # of the tokens in the loss of a batch
KlEstimator = Literal["k1", "k2", "k3"]


def kl_penalties(log_r_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Return estimates of KL(π_θ ‖ π_ref), in nats, from log_r_t = log π_ref − log π_θ of the sampled tokens. Shape
    (T,).

    k1 = −log r, k2 = (log r)² / 2, k3 = r − 1 − log r (J. Schulman, "Approximating KL Divergence", 2020). k1 and k3
    have the divergence as their mean, k2 nearly where the two are close; k2 and k3 are never negative; GRPO uses k3.
    A penalty acts by its gradient, whose mean over tokens of π_θ is another matter: that of k2 is the gradient of
    KL(π_θ ‖ π_ref), that of k3 the gradient of KL(π_ref ‖ π_θ), that of k1 is 0, so that k1 adds noise and does not
    hold the policy.

    The authors' code has k2 as "mse" and k3 as "low_var_kl". Departure: it clamps k3 to 10, and a token beyond that
    (r above 13.6 or below e^−11) has no gradient of the penalty there; nothing is clamped here. Its k2 is this one.
    """
    if estimator == "k1":
        return -log_r_T
    if estimator == "k2":
        return 0.5 * log_r_T.square()
    return log_r_T.expm1() - log_r_T


def token_weights(lengths_N: Sequence[int], average: str, max_response_tokens: int) -> FloatArray:
    """Return how much each response token counts in the loss of a batch, response after response. Shape (Σ lengths,).

    "response" is Eq. 1: the mean over the tokens of a response, then over the responses. "token": the mean over
    all tokens of the batch, so that a response counts by its length. "constant": the sum over the tokens divided by
    responses · `max_response_tokens`, a number that no response changes (Dr. GRPO, arXiv 2503.20783). All counts
    are those of the global batch, so that the loss does not depend on how it is cut into micro-batches; responses
    without tokens count as none.

    Departure of "token" from the authors' code, which takes the mean over the tokens of each micro-batch of four
    responses and then over the micro-batches: there a token's weight depends on its neighbours.
    """
    lengths = np.asarray(lengths_N, dtype=np.int64)
    num_responses = max(int((lengths > 0).sum()), 1)
    if average == "response":
        counts_N = np.maximum(lengths, 1) * num_responses
    elif average == "token":
        counts_N = np.full(len(lengths), max(int(lengths.sum()), 1))
    else:
        counts_N = np.full(len(lengths), num_responses * max_response_tokens)
    return np.repeat(1.0 / counts_N, lengths)


def outcome_rewards(
    scores_N: Sequence[float],
    verdicts_N: Sequence[int] | None = None,
    well_formed_N: Sequence[bool] | None = None,
    *,
    ground_truth_weight: float = 1.0,
    format_weight: float = 0.0,
) -> FloatArray:
    """Eq. 2: 1 for each response whose extracted answer equals the gold answer, else 0. Shape (N,).

    Departure: a task may score answers between 0 and 1.

    Two switches of the authors' code go beyond it: with a `ground_truth_weight` w below 1 the rest of the reward is
    the verifier's, w · Eq. 2 + (1 − w) · 1[verdict is right], but Eq. 2 alone where there is no verdict (−1);
    `format_weight` is added where the response keeps the form. Raises ValueError where one is asked for without what it
    needs.
    """
    rewards = _finite(np.asarray(scores_N, dtype=np.float64))
    if ground_truth_weight != 1.0:
        if verdicts_N is None:
            raise ValueError("a ground_truth_weight below 1 needs the verifier's verdicts")
        verdicts = np.asarray(verdicts_N)
        by_verifier = np.where(verdicts == -1, rewards, verdicts == 1)
        rewards = ground_truth_weight * rewards + (1.0 - ground_truth_weight) * by_verifier
    if format_weight:
        if well_formed_N is None:
            raise ValueError("a format_weight needs to know which responses keep the form")
        rewards = rewards + format_weight * np.asarray(well_formed_N, dtype=np.float64)
    return rewards


def step_rewards(judgements_K: Sequence[int]) -> FloatArray:
    """Eq. 3: y_k / K for the K steps of one solution, y_k ∈ {−1, +1}; each belongs to token I(k). Shape (K,).

    Empty for a solution without step rewards: one that has no steps, or whose verification does not judge each of them
    exactly once. The paper does not say how such a solution counts; as in its authors' code it gets no step rewards,
    and none of it enters the statistics of Eq. 5. (Counting a missing judgement as 0, which lies below +1 / K, would
    punish a right solution for a verification that was cut off.)
    """
    judgements = np.asarray(judgements_K, dtype=np.float64)
    if not (np.abs(judgements) == 1.0).all():
        raise ValueError(f"step judgements must be +1 or -1, or none at all, got {list(judgements_K)}")
    return judgements / max(len(judgements), 1)


def normalize(rewards_S: FloatArray) -> FloatArray:
    """(r − mean) / std over all S rewards given; the normalisation inside Eqs. 4, 5 and 9. Shape (S,).

    The standard deviation is the unbiased one (divided by S − 1), as in veRL, on which the paper's experiments
    ran; nothing is added to it. Where it is undefined (S < 2) or all rewards are equal, the result is 0: no
    preference, so no gradient. "Equal" allows for rounding: a spread below 1e-8 of the largest magnitude.
    Raises ValueError on NaN or infinity.
    """
    rewards = _finite(rewards_S)
    if _all_equal(rewards):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std(ddof=1)


def leave_one_out(rewards_S: FloatArray) -> FloatArray:
    """r_i minus the mean of the other S − 1 rewards given: RLOO's Eqs. 4, 5 and 9. Shape (S,).

    Exactly 0 where there is no other reward or all are equal. Raises ValueError on NaN or infinity.
    """
    rewards = _finite(rewards_S)
    if _all_equal(rewards):
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def less_mean(rewards_S: FloatArray) -> FloatArray:
    """r_i minus the mean of all S rewards given, exactly 0 where all are equal. Shape (S,). As `leave_one_out`."""
    rewards = _finite(rewards_S)
    return np.zeros_like(rewards) if _all_equal(rewards) else rewards - rewards.mean()


def step_advantages(normalized_K: FloatArray, step_end_tokens_K: Sequence[int], num_tokens: int) -> FloatArray:
    """Eq. 6: token t gets the sum of the normalised rewards of the steps with I(k) ≥ t. Shape (num_tokens,).

    The last token of a step still belongs to it; tokens after the last step (the answer, or a step that the
    response ends inside of) get 0, and so does every token of a response without steps. Raises ValueError
    where the ends are not in order, not inside the response, or not as many as the rewards.
    """
    ends = np.asarray(step_end_tokens_K, dtype=np.int64)
    if len(ends) != len(normalized_K):
        raise ValueError(f"{len(normalized_K)} step rewards for {len(ends)} step ends")
    if len(ends) and (ends[0] < 0 or ends[-1] >= num_tokens or (np.diff(ends) < 0).any()):
        raise ValueError(f"step ends must rise within 0..{num_tokens - 1}, got {ends.tolist()}")
    at_token_T = np.zeros(num_tokens)
    np.add.at(at_token_T, ends, normalized_K)
    return np.cumsum(at_token_T[::-1])[::-1].copy()


def whitened_step_advantages(sums_N_T: Sequence[FloatArray]) -> list[FloatArray]:
    """REINFORCE++'s Eq. 5 after Eq. 6: the sums at all tokens of the batch, minus their mean, over their deviation.

    `sums_N_T` are those of the responses that have step rewards; every token counts once, those after the last step
    too. As the paper words it ("whitened over the batch"). In the authors' code a loop over the wrong axis leaves
    little of the step rewards before the whitening.
    """
    lengths_N = [len(sums_T) for sums_T in sums_N_T]
    return np.split(normalize(np.concatenate([np.zeros(0), *sums_N_T])), np.cumsum(lengths_N)[:-1])


def generator_advantages(
    outcome_advantage: float, step_advantages_T: FloatArray, alpha: float, step_scale: float = 1.0
) -> FloatArray:
    """Eq. 7: (1 − α) · outcome advantage + α · step_scale · step advantage of each token of one response. Shape (T,).

    α = 0 is the vanilla algorithm. `step_scale` is 1 in the paper; the authors' code multiplies RLOO's step advantages,
    which no standard deviation divides, by 10. Raises ValueError unless 0 ≤ α ≤ 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be within [0, 1], got {alpha}")
    return (1.0 - alpha) * outcome_advantage + alpha * step_scale * step_advantages_T


def alpha_schedule(
    step: int, total_steps: int, start: float, end: float, schedule: AlphaSchedule = "exponential"
) -> float:
    """α of generator step `step` = 0, 1, …, with x = step / (total_steps − 1):

    exponential: start · (end / start)^x; linear: start + (end − start) · x; cosine: end + (start − end) · (1 + cos πx)
    / 2; constant: start. The first step has `start`, the last of `total_steps` has `end`, and so has any after it; a
    run of one step has `start`. The paper names the two values and "exponential decay", not the formula; the authors'
    code has the other two as switches, and comes to `end` one step after the last. `start` = 0 switches step advantages
    off (α = 0 throughout).
    """
    if start == 0.0:
        return 0.0
    least = "(0" if schedule == "exponential" else "[0"
    if not (0.0 < start <= 1.0 and 0.0 <= end <= 1.0) or (schedule == "exponential" and end == 0.0):
        raise ValueError(f"alpha must start within [0, 1] and end within {least}, 1], got {start} and {end}")
    if schedule == "constant" or total_steps <= 1:
        return start
    done = min(step / (total_steps - 1), 1.0)
    if schedule == "linear":
        return start + (end - start) * done
    if schedule == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * done)) / 2
    return end if done == 1.0 else start * (end / start) ** done


def verifier_reward(verdict: int, correct: bool, format_reward: float, gamma: float) -> float:
    """Eq. 8: 1[verdict == r_out] + γ · format reward, for a verdict of 1 (right), 0 (wrong) or −1 (missing).

    `correct` tells whether the judged solution's answer equals the gold answer. A missing verdict equals
    neither. Raises ValueError on a format reward that is NaN or outside [0, 1].
    """
    if verdict not in (-1, 0, 1):
        raise ValueError(f"a final judgement must be 1, 0 or -1 (missing), got {verdict}")
    if not 0.0 <= format_reward <= 1.0:
        raise ValueError(f"the format reward must be within [0, 1], got {format_reward}")
    return float(verdict == int(correct)) + gamma * format_reward


class ClassWeights(NamedTuple):
    """s_+ and s_− of Eq. 9: the weights of verifications of right and of wrong solutions."""

    right: float
    wrong: float


def class_weights(
    average_right: float,
    average_wrong: float,
    batch_right: int,
    batch_wrong: int,
    method: ClassWeighting = "sqrt_inverse",
) -> ClassWeights:
    """s_± of Eq. 9: c / √(number of right / wrong solutions). "inverse" leaves the root out, "off" gives 1 and 1.

    `average_*` are the moving averages of those numbers, `batch_*` the numbers in the batch that the weights
    will be used on. The paper leaves c open: here the batch's mean weight is 1, so that the weights shift
    attention between the classes without changing the size of the update; a batch with only one class has
    weight 1. The averages count as at least 1: a class that has not been seen for long must not get a weight
    without bound when it comes back. Raises ValueError on an empty batch.
    """
    if batch_right + batch_wrong == 0:
        raise ValueError("class weights of a batch without solutions")
    _finite(np.asarray([average_right, average_wrong]))
    power = {"sqrt_inverse": -0.5, "inverse": -1.0, "off": 0.0}[method]
    right, wrong = max(average_right, 1.0) ** power, max(average_wrong, 1.0) ** power
    mean = (batch_right * right + batch_wrong * wrong) / (batch_right + batch_wrong)
    return ClassWeights(right / mean, wrong / mean)


@dataclass
class ClassWeightEma:
    """Moving averages, over the verifier's steps, of the numbers of right and wrong solutions in a batch.

    As in Algorithm 1, a step uses the averages of the steps before it and is taken in by `update` after it; the
    first step, which has none, uses its own numbers.
    """

    decay: float
    method: ClassWeighting = "sqrt_inverse"
    average_right: float = 0.0
    average_wrong: float = 0.0
    num_updates: int = 0

    def weights(self, batch_right: int, batch_wrong: int) -> ClassWeights:
        """Return the weights for a batch with these numbers of right and wrong solutions."""
        if self.num_updates == 0:
            return class_weights(batch_right, batch_wrong, batch_right, batch_wrong, self.method)
        return class_weights(self.average_right, self.average_wrong, batch_right, batch_wrong, self.method)

    def update(self, batch_right: int, batch_wrong: int) -> None:
        """Take in a batch: average ← decay · average + (1 − decay) · number; the first batch is the start."""
        keep = self.decay if self.num_updates else 0.0
        self.average_right = keep * self.average_right + (1.0 - keep) * batch_right
        self.average_wrong = keep * self.average_wrong + (1.0 - keep) * batch_wrong
        self.num_updates += 1

    def state_dict(self) -> dict[str, float]:
        """Return the averages for a checkpoint; JSON."""
        return {
            "average_right": self.average_right,
            "average_wrong": self.average_wrong,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` gave; the decay stays that of the configuration."""
        self.average_right = float(state["average_right"])
        self.average_wrong = float(state["average_wrong"])
        self.num_updates = int(state["num_updates"])


def _finite(values: FloatArray) -> FloatArray:
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite numbers, got {values.tolist()}")
    return values


def _all_equal(values: FloatArray) -> bool:
    return len(values) < 2 or float(np.ptp(values)) <= 1e-8 * float(np.abs(values).max())
