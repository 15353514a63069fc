"""Solutions and verifications as files of advantages see them, for training and for `tango score` alike. No torch."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.method import equations
from tango_hpc.method.batches import Solutions, Verifications
from tango_hpc.method.equations import ClassWeights, FloatArray
from tango_hpc.method.hooks import AdvantagesHook
from tango_hpc.method.step_labels import agreement
from tango_hpc.method.vote import majority_vote
from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.verification import Verification


@dataclass(frozen=True)
class ScoredSolution:
    """A solution of the group `group_id` with I(k) and its number of tokens, and its verification, if there is one.

    `score`: Eq. 2, of an answer that is `correct` or not. `others`: further verifications of it, as many for each
    solution of a batch. `truncated`: it was cut off at the longest response.
    """

    group_id: str
    solution: Solution
    correct: bool
    score: float
    step_end_tokens: Sequence[int]
    num_tokens: int
    verification: Verification | None
    others: Sequence[Verification] = ()
    truncated: bool = False

    @property
    def verifications(self) -> list[Verification]:
        """All of them, the first one first."""
        return [] if self.verification is None else [self.verification, *self.others]


@dataclass(frozen=True)
class Moment:
    """The place in a run that advantages depend on: Eq. 7's α, the steps of the role before this one and in all, the
    longest response, and the state that the file returned in the step before.
    """

    alpha: float = 0.0
    step: int = 0
    total_steps: int = 1
    max_response_tokens: int = 0
    state: Any = None


@dataclass(frozen=True)
class Scored:
    """Rewards and advantages of N responses; `kept` tells which are trained on, the others have advantages of 0.

    `step_rewards_N_K`: of several verifications of a solution the mean of those that give it step rewards; of
    verifications none.
    """

    rewards_N: FloatArray
    step_rewards_N_K: list[FloatArray]
    kept_N: list[bool]
    advantages_N_T: list[FloatArray]
    state: Any

    def silencing(self, silent_N: Sequence[bool]) -> Scored:
        """Return the same without those responses: they are not trained on."""
        if not any(silent_N):
            return self
        kept_N = [kept and not silent for kept, silent in zip(self.kept_N, silent_N, strict=True)]
        advantages_N_T = [
            np.zeros_like(one_T) if silent else one_T
            for one_T, silent in zip(self.advantages_N_T, silent_N, strict=True)
        ]
        return replace(self, kept_N=kept_N, advantages_N_T=advantages_N_T)


def scored(batch: Any, step_rewards_N_K: list[FloatArray], hook: AdvantagesHook, state: Any) -> Scored:
    """Return what the file makes of the batch."""
    found, state = hook(batch, state)
    kept_N = [one is not None for one in found]
    advantages_N_T = [np.zeros(n) if one is None else one for one, n in zip(found, batch.lengths, strict=True)]
    return Scored(batch.rewards, step_rewards_N_K, kept_N, advantages_N_T, state)


def score_solutions(
    solutions_N: Sequence[ScoredSolution], settings: AlgorithmConfig, hook: AdvantagesHook, moment: Moment
) -> Scored:
    """Eqs. 2 to 7 by a config's settings. A solution that was not verified completely has no step rewards.

    Raises ValueError where a solution's parts do not fit each other.
    """
    given_N_V = [_given(read, settings) for read in solutions_N]
    counts = sorted({len(given_V) for given_V in given_N_V})
    if len(counts) > 1:
        raise ValueError(f"each solution of a batch needs as many verifications, got {counts}")
    verdicts_V_N = [[one.final for one in given_N] for given_N in zip(*given_N_V, strict=True)]
    outcomes_V_N = [
        equations.outcome_rewards(
            [read.score for read in solutions_N],
            verdicts_N,
            [read.solution.well_formed for read in solutions_N],
            ground_truth_weight=settings.ground_truth_weight,
            format_weight=settings.generator_format_weight,
        )
        for verdicts_N in verdicts_V_N or [[-1] * len(solutions_N)]
    ]
    batch = Solutions(
        groups=[read.group_id for read in solutions_N],
        rewards=np.mean(outcomes_V_N, axis=0),
        correct=np.array([read.correct for read in solutions_N]),
        step_rewards=[
            [equations.step_rewards(one.judgements if one.is_complete else ()) for one in given_V]
            for given_V in given_N_V
        ],
        step_ends=[read.step_end_tokens for read in solutions_N],
        lengths=[read.num_tokens for read in solutions_N],
        truncated=np.array([read.truncated for read in solutions_N]),
        alpha=moment.alpha,
        step=moment.step,
        total_steps=moment.total_steps,
        max_response_tokens=moment.max_response_tokens,
    )
    return scored(batch, batch.mean_step_rewards(), hook, moment.state)


def score_verifications(
    group_ids_N: Sequence[str],
    correct_N: Sequence[bool],
    verifications_N: Sequence[Verification],
    num_tokens_N: Sequence[int],
    *,
    weights: ClassWeights,
    gamma: float,
    hook: AdvantagesHook,
    moment: Moment,
    labels_N_K: Sequence[Sequence[int]] = (),
    label_weight: float = 0.0,
) -> Scored:
    """Eqs. 8 and 9 for the verifications of a step; those with the same group id judge the same solution.

    Departure: where steps have labels by trying (`labels_N_K`, empty for a solution without), the share of judgements
    that agree with them is added to Eq. 8 with `label_weight`.

    `correct_N` tells whether that solution's answer is right. `weights` come from `ClassWeightEma.weights`, with the
    numbers of right and wrong *solutions* of this batch. Raises ValueError where the inputs do not fit each other.
    """
    rewards_N = [
        equations.verifier_reward(read.final, correct, read.format_reward, gamma)
        + label_weight * agreement(read.judgements if labels_K else (), labels_K)
        for read, correct, labels_K in zip(
            verifications_N, correct_N, labels_N_K or [()] * len(verifications_N), strict=True
        )
    ]
    correct = np.array(correct_N, dtype=bool)
    batch = Verifications(
        groups=group_ids_N,
        rewards=np.array(rewards_N),
        correct=correct,
        verdicts=np.array([read.final for read in verifications_N]),
        format_rewards=np.array([read.format_reward for read in verifications_N]),
        class_weights=np.where(correct, weights.right, weights.wrong),
        lengths=num_tokens_N,
        step=moment.step,
        total_steps=moment.total_steps,
    )
    return scored(batch, [], hook, moment.state)


def num_right_and_wrong_solutions(
    group_ids_N: Sequence[Hashable], solution_correct_N: Sequence[bool]
) -> tuple[int, int]:
    """Return how many of the solutions that a verifier step judges are right and wrong: what `ClassWeightEma`
    counts.
    """
    correct_by_group = dict(zip(group_ids_N, solution_correct_N, strict=True))
    num_right = sum(bool(correct) for correct in correct_by_group.values())
    return num_right, len(correct_by_group) - num_right


def state_as_json(moment: Moment) -> str | None:
    """Return the state of a file of advantages before the step, for a dump; None where it has none."""
    return None if moment.state is None else json.dumps(moment.state)


def _given(read: ScoredSolution, settings: AlgorithmConfig) -> list[Verification]:
    """Return the verifications of a solution that count, each by itself: all, or their vote."""
    if read.verifications and settings.combine_verifications == "vote":
        return [majority_vote(read.verifications)]
    return read.verifications
