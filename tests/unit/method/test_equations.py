"""Every equation against numbers derived by hand; the derivations stand beside them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tango_hpc.base.config.hooks import CorrectionConfig, LossConfig
from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.method import equations
from tango_hpc.method.equations import ClassWeightEma, ClassWeights
from tango_hpc.method.hooks import load_hook
from tango_hpc.method.tokens import Tokens
from tango_hpc.models.trainer.loss import LossSettings
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import CORRECT, INCORRECT, read_verification
from tango_hpc.stages.scoring import Moment, ScoredSolution, num_right_and_wrong_solutions, score_solutions
from tests.helpers.advantages import advantages_of, for_generator, for_verifier, solutions, verifications

NAN = float("nan")
ALGORITHMS = ("grpo", "rloo", "reinforce_plus_plus", "dr_grpo")


def close(actual, expected) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-12, atol=1e-12)


def outcome_advantages(rewards: np.ndarray, algorithm: str) -> np.ndarray:
    """Eq. 4 for the solutions of one question, of a token each."""
    none: list[list[int]] = [[] for _ in rewards]
    batch = solutions(["q"] * len(rewards), [True] * len(rewards), none, none, [1] * len(rewards), 0.0)
    return np.concatenate(advantages_of(for_generator(algorithm), replace(batch, rewards=rewards)))


def normalized_step_rewards(rewards: list[np.ndarray], algorithm: str) -> list[np.ndarray]:
    """Eq. 5 for the solutions of one question: the difference that each step makes to Eq. 6."""
    count = len(rewards)
    none: list[list[int]] = [[]] * count
    ends, lengths = [range(len(one)) for one in rewards], [len(one) + 1 for one in rewards]
    batch = solutions(["q"] * count, [True] * count, none, ends, lengths, 1.0)
    batch = replace(batch, step_rewards=[[one] for one in rewards])
    return [-np.diff(sums) for sums in advantages_of(for_generator(algorithm), batch)]


def verifier_advantages(rewards: np.ndarray, weights: np.ndarray, algorithm: str) -> np.ndarray:
    """Eq. 9 for the verifications of one solution, of a token each."""
    count = len(rewards)
    batch = verifications(["s"] * count, [True] * count, [1] * count, [1.0] * count, [1] * count, ClassWeights(1, 1), 0)
    batch = replace(batch, rewards=rewards, class_weights=weights)
    return np.concatenate(advantages_of(for_verifier(algorithm), batch))


# Eq. 1


TIS = load_hook(CorrectionConfig())
GRPO = load_hook(LossConfig(settings={"clip_low": 0.2, "clip_high": 0.3}))


def terms_of(
    logprobs: torch.Tensor, advantage: float, weight=None, reference=None, entropies=None, **options
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one token whose old log-probability is −1, and its statistics."""
    one = torch.ones(1, dtype=torch.float64)
    given = None if weight is None else replace(TIS, function=lambda tokens, settings: (weight, {}), statistics={})
    settings = LossSettings(GRPO, given, **options)
    tokens = Tokens(logprobs, -one, advantage * one, 0 * one, one, 0 * one)
    return settings.terms(tokens, one if entropies is None else entropies, reference)


def loss_of(ratio: float, advantage: float, **options) -> tuple[float, float, bool, float]:
    """Loss, KL, clipped and d loss / d logprob of one token whose old log-probability is −1."""
    logprobs = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss_T, measured = terms_of(logprobs, advantage, **options)
    (gradient,) = torch.autograd.grad(loss_T.sum(), logprobs)
    return loss_T.item(), measured["kl"].item(), measured["loss/clip_share"].item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, False, -2.0),  # on policy: loss −A, gradient −c A
        (1.2, 2.0, -2.4, False, -2.4),  # inside the clip: −1.2 · 2
        (1.5, 2.0, -2.6, True, 0.0),  # above 1 + 0.3 with A > 0: −1.3 · 2, no gradient
        (0.5, 2.0, -1.0, False, -1.0),  # below 1 − 0.2 with A > 0: min picks the unclipped 0.5 · 2
        (0.5, -2.0, 1.6, True, 0.0),  # below with A < 0: min(−1.0, −1.6) = −1.6
        (1.5, -2.0, 3.0, False, 3.0),  # above with A < 0: min(−3.0, −2.6) = −3.0
        (1.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_eq1_clip(ratio, advantage, loss, clipped, gradient):
    actual = loss_of(ratio, advantage)
    close(actual[0], loss)
    assert actual[2] is clipped
    close(actual[3], gradient)


def test_eq1_kl_is_k3_and_differentiable():
    # log r = log(π_ref / π_θ) = −2 − (−1) = −1: k3 = e^−1 − (−1) − 1 = e^−1 = 0.36788
    # d k3 / d logprob = −(r − 1) = 1 − e^−1; on policy with A = 2 the rest contributes −2
    reference = torch.tensor([-2.0], dtype=torch.float64)
    loss, kl, _, gradient = loss_of(1.0, 2.0, reference=reference, kl_coef=0.1)
    close(kl, math.exp(-1))
    close(loss, -2.0 + 0.1 * math.exp(-1))
    close(gradient, -2.0 + 0.1 * (1 - math.exp(-1)))


@pytest.mark.parametrize(
    ("estimator", "kl", "gradient"),
    [
        ("k1", -2.0, 1.0),  # −log r; d(log π_θ − log π_ref) = 1 wherever the reference is
        ("k2", 2.0, -2.0),  # 2² / 2; d = −log r
        ("k3", math.exp(2) - 3, 1 - math.exp(2)),  # e² − 1 − 2; d = 1 − r
    ],
)
def test_eq1_kl_estimators(estimator, kl, gradient):
    # log r = 1 − (−1) = 2: the reference gives the token e² times what the policy does; the advantage is 0
    reference = torch.tensor([1.0], dtype=torch.float64)
    loss, actual, _, slope = loss_of(1.0, 0.0, reference=reference, kl_coef=0.1, kl_estimator=estimator)
    close(actual, kl)
    close(loss, 0.1 * kl)
    close(slope, 0.1 * gradient)


def test_eq1_kl_is_not_clamped():
    # log r = 4 − (−1) = 5: k3 = e⁵ − 6 = 142.4, which the authors' code cuts to 10
    reference = torch.tensor([4.0], dtype=torch.float64)
    _, kl, _, gradient = loss_of(1.0, 0.0, reference=reference, kl_coef=1.0)
    close(kl, math.exp(5) - 6)
    close(gradient, 1 - math.exp(5))


def expected_penalty_gradient(policy: torch.Tensor, reference: torch.Tensor, estimator) -> torch.Tensor:
    """Mean, over tokens drawn from softmax(policy), of the gradient of the penalty on each of them."""
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    penalties = equations.kl_penalties(reference.log_softmax(-1) - logprobs, estimator)
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * penalties).sum(), logits)
    return gradient


def test_on_average_k2_pulls_by_one_kl_k3_by_the_other_and_k1_not_at_all():
    policy = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    reference = torch.tensor([1.0, 0.5, -0.7, 0.2], dtype=torch.float64)
    logits = policy.clone().requires_grad_()
    mine, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    (reverse,) = torch.autograd.grad((mine.exp() * (mine - theirs)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((theirs.exp() * (theirs - mine)).sum(), logits)
    assert reverse.abs().max() > 0.1 and forward.abs().max() > 0.1
    close(expected_penalty_gradient(policy, reference, "k1"), torch.zeros(4))
    close(expected_penalty_gradient(policy, reference, "k2"), reverse)
    close(expected_penalty_gradient(policy, reference, "k3"), forward)


def test_eq1_importance_weight_scales_the_policy_term_only():
    reference = torch.tensor([-2.0], dtype=torch.float64)
    weights = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    loss, _, _, gradient = loss_of(1.0, 2.0, reference=reference, kl_coef=0.1, weight=weights)
    close(loss, -1.0 + 0.1 * math.exp(-1))
    close(gradient, -1.0 + 0.1 * (1 - math.exp(-1)))
    assert weights.grad is None


def test_eq1_entropy_bonus():
    # on policy with A = 2 and weight 0.5: −0.5 · 2; the bonus −0.01 · 3 is not weighted; d loss / d H = −0.01
    entropies = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    options = {"weight": torch.tensor([0.5], dtype=torch.float64), "entropies": entropies}
    close(loss_of(1.0, 2.0, entropy_coef=0.01, **options)[0], -1.03)
    reference = torch.tensor([-2.0], dtype=torch.float64)  # and with a KL penalty of 0.1 · e^−1 as above
    loss, kl, _, gradient = loss_of(1.0, 2.0, entropy_coef=0.01, reference=reference, kl_coef=0.1, **options)
    close([loss, kl, gradient], [-1.03 + 0.1 * math.exp(-1), math.exp(-1), -1.0 + 0.1 * (1 - math.exp(-1))])
    loss_T, _ = terms_of(-torch.ones(1, dtype=torch.float64), 1.0, entropies=entropies, entropy_coef=0.01)
    close(torch.autograd.grad(loss_T.sum(), entropies)[0], [-0.01])


def test_eq1_without_entropy_bonus_leaves_the_entropies_out_of_the_loss():
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    entropies = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    terms_of(logprobs, 1.0, entropies=entropies)[0].sum().backward()
    assert logprobs.grad is not None and entropies.grad is None


def test_eq1_without_reference_has_zero_kl():
    assert loss_of(1.0, 2.0)[1] == 0.0


# Two responses of 1 and 3 tokens, and one without any, which counts as none
@pytest.mark.parametrize(
    ("average", "weights"),
    [
        ("response", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),  # 1 / (1 · 2), then 1 / (3 · 2)
        ("token", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),  # four tokens in all
        ("constant", [1 / 20, 1 / 20, 1 / 20, 1 / 20]),  # 2 responses of at most 10 tokens
    ],
)
def test_loss_averages(average, weights):
    close(equations.token_weights([1, 0, 3], average, 10), weights)


@pytest.mark.parametrize("average", ["response", "token", "constant"])
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_loss_averages_of_no_tokens_are_empty(average, lengths):
    assert equations.token_weights(lengths, average, 10).shape == (0,)


# Eqs. 2 and 3


def test_eq2():
    close(equations.outcome_rewards([True, False]), [1.0, 0.0])


def test_eq2_with_the_verifiers_word_and_with_the_form():
    # 3/4 of the answer and 1/4 of the verdict: 3/4 + 0, 0 + 1/4, 3/4 + 1/4; without a verdict the answer alone
    rewards = equations.outcome_rewards([True, False, True, False, True], [0, 1, 1, -1, -1], ground_truth_weight=0.75)
    close(rewards, [0.75, 0.25, 1.0, 0.0, 1.0])
    close(equations.outcome_rewards([True, False], None, [False, True], format_weight=0.1), [1.0, 0.1])
    with pytest.raises(ValueError, match="verdicts"):
        equations.outcome_rewards([True], ground_truth_weight=0.5)
    with pytest.raises(ValueError, match="keep the form"):
        equations.outcome_rewards([True], format_weight=0.5)


def test_eq3_divides_by_the_number_of_steps():
    close(equations.step_rewards([1, -1, 1, 1]), [0.25, -0.25, 0.25, 0.25])
    close(equations.step_rewards([-1]), [-1.0])
    assert equations.step_rewards([]).shape == (0,)


@pytest.mark.parametrize("judgements", [[2], [NAN], [0.5], [1, 0, -1]])
def test_eq3_refuses_what_is_no_judgement(judgements):
    with pytest.raises(ValueError, match="judgements"):
        equations.step_rewards(judgements)


# Eq. 4


def test_eq4_grpo():
    # rewards 1, 0, 0, 0: mean 1/4; squared deviations 9/16 + 3 · 1/16 = 3/4; unbiased variance (3/4) / 3 = 1/4; std 1/2
    # (1 − 1/4) / (1/2) = 3/2, (0 − 1/4) / (1/2) = −1/2
    close(outcome_advantages(np.array([1.0, 0, 0, 0]), "grpo"), [1.5, -0.5, -0.5, -0.5])


def test_eq4_rloo():
    # rewards 1, 0, 0, 1: others of the first: (0 + 0 + 1) / 3, so 1 − 1/3; of the second: (1 + 0 + 1) / 3, so −2/3
    close(outcome_advantages(np.array([1.0, 0, 0, 1]), "rloo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1.8])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_eq4_equal_rewards_give_exactly_zero(algorithm, value, count):
    advantages = outcome_advantages(np.full(count, value), algorithm)
    assert (advantages == 0.0).all()


def test_eq4_rewards_that_differ_by_rounding_are_equal():
    rewards = np.array([0.1 + 0.2, 0.3, 0.3])
    assert rewards[0] != rewards[1]
    assert (outcome_advantages(rewards, "grpo") == 0.0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_eq4_refuses_nan_and_infinity(algorithm, bad):
    with pytest.raises(ValueError, match="finite"):
        outcome_advantages(np.array([1.0, bad]), algorithm)


# Eq. 5


def test_eq5_grpo_normalises_over_all_steps_of_the_group():
    # solution 1: one right step, +1; solution 2: two wrong ones, −1/2 each. Three numbers: mean 0; squares
    # 1 + 1/4 + 1/4 = 3/2; unbiased variance 3/4; std √3/2. So 2/√3 and −1/√3 each.
    first, second = normalized_step_rewards([np.array([1.0]), np.array([-0.5, -0.5])], "grpo")
    close(first, [2 / math.sqrt(3)])
    close(second, [-1 / math.sqrt(3), -1 / math.sqrt(3)])


def test_eq5_rloo_leaves_the_single_step_out():
    # four step rewards 1, −1/2, −1/2, 1: to the first the others' mean is (−1/2 − 1/2 + 1) / 3 = 0, so 1; to the second
    # (1 − 1/2 + 1) / 3 = 1/2, so −1
    rewards = [np.array([1.0]), np.array([-0.5, -0.5]), np.array([1.0])]
    first, second, third = normalized_step_rewards(rewards, "rloo")
    close(first, [1.0])
    close(second, [-1.0, -1.0])
    close(third, [1.0])


def test_eq5_one_step_alone():
    # mean 0 and deviation 1, as in the authors' code; with nothing else to compare it with, RLOO gives 0
    assert [r.tolist() for r in normalized_step_rewards([np.array([1.0])], "grpo")] == [[1.0]]
    assert [r.tolist() for r in normalized_step_rewards([np.array([1.0])], "rloo")] == [[0.0]]


def test_eq5_rloo_gives_exactly_zero_to_the_only_step_of_a_group():
    # the mean of no others: no comparison, whatever the reward and however many solutions without steps stand beside it
    with np.errstate(all="raise"):
        for reward in (1.0, -1.0):
            alone = [np.zeros(0), np.array([reward]), np.zeros(0)]
            assert [r.tolist() for r in normalized_step_rewards(alone, "rloo")] == [[], [0.0], []]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_eq5_no_steps_and_equal_steps_give_zero(algorithm):
    assert [r.tolist() for r in normalized_step_rewards([np.zeros(0), np.zeros(0)], algorithm)] == [[], []]
    equal = [np.full(3, 1 / 3), np.full(3, 1 / 3)]
    assert [r.tolist() for r in normalized_step_rewards(equal, algorithm)] == [[0.0] * 3] * 2


def test_eq5_refuses_nan():
    with pytest.raises(ValueError, match="finite"):
        normalized_step_rewards([np.array([1.0]), np.array([NAN])], "grpo")


# Eq. 6


def test_eq6_sums_the_steps_that_end_at_or_after_the_token():
    # steps end at tokens 1 and 4 with 0.5 and −2; token 5 is after the last step
    close(equations.step_advantages(np.array([0.5, -2.0]), [1, 4], 6), [-1.5, -1.5, -2.0, -2.0, -2.0, 0.0])


def test_eq6_two_steps_may_end_in_one_token():
    close(equations.step_advantages(np.array([1.0, 2.0]), [1, 1], 3), [3.0, 3.0, 0.0])


def test_eq6_no_steps():
    close(equations.step_advantages(np.zeros(0), [], 3), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("ends", [[0], [2, 1], [-1, 1], [1, 3]])
def test_eq6_refuses_ends_that_do_not_fit(ends):
    with pytest.raises(ValueError, match="step"):
        equations.step_advantages(np.array([1.0, 2.0]), ends, 3)


def test_eq5_reinforce_whitens_the_sums_of_eq6_over_all_tokens():
    # sums 2, 0 and 1, 1: mean 1; squares 1 + 1; unbiased variance 2/3
    first, second = equations.whitened_step_advantages([np.array([2.0, 0.0]), np.array([1.0, 1.0])])
    close(first, [math.sqrt(1.5), -math.sqrt(1.5)])
    close(second, [0.0, 0.0])
    assert [part.tolist() for part in equations.whitened_step_advantages([])] == [[]]


# Eq. 7 and the schedule of α


def test_eq7_blends():
    close(equations.generator_advantages(2.0, np.array([1.0, -1.0]), 0.25), [1.75, 1.25])
    close(equations.generator_advantages(2.0, np.array([1.0, -1.0]), 0.0), [2.0, 2.0])
    close(equations.generator_advantages(2.0, np.array([1.0, -1.0]), 0.25, step_scale=10), [4.0, -1.0])
    with pytest.raises(ValueError, match="alpha"):
        equations.generator_advantages(2.0, np.array([1.0]), NAN)


def test_alpha_decays_exponentially_from_first_to_last_step():
    # 5 steps from 0.1 to 0.001: a factor of 100 over 4 intervals, i.e. √10 each
    alphas = [equations.alpha_schedule(step, 5, 0.1, 0.001) for step in range(5)]
    close(alphas, [0.1, 0.1 / math.sqrt(10), 0.01, 0.01 / math.sqrt(10), 0.001])
    assert equations.alpha_schedule(9, 5, 0.1, 0.001) == 0.001
    assert equations.alpha_schedule(0, 1, 0.1, 0.001) == 0.1
    assert equations.alpha_schedule(3, 5, 0.0, 0.0) == 0.0
    with pytest.raises(ValueError, match="alpha"):
        equations.alpha_schedule(0, 5, 0.1, 0.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 0.4, 0.3, 0.2, 0.1]),
        ("cosine", [0.5, 0.3 + 0.2 / math.sqrt(2), 0.3, 0.3 - 0.2 / math.sqrt(2), 0.1]),  # (1 + cos π/4) / 2, ...
        ("constant", [0.5] * 5),
    ],
)
def test_other_schedules_of_alpha(schedule, expected):
    close([equations.alpha_schedule(step, 5, 0.5, 0.1, schedule) for step in range(5)], expected)
    assert equations.alpha_schedule(9, 5, 0.5, 0.1, schedule) == pytest.approx(expected[-1])
    assert equations.alpha_schedule(0, 1, 0.5, 0.1, schedule) == 0.5


# Eq. 8


@pytest.mark.parametrize(
    ("verdict", "correct", "reward"),
    [(1, True, 1.4), (0, True, 0.4), (1, False, 0.4), (0, False, 1.4), (-1, True, 0.4), (-1, False, 0.4)],
)
def test_eq8(verdict, correct, reward):
    close(equations.verifier_reward(verdict, correct, 0.5, 0.8), reward)  # 0.8 · 0.5 = 0.4


@pytest.mark.parametrize(("verdict", "format_reward"), [(1, NAN), (1, 1.1), (2, 1.0)])
def test_eq8_refuses(verdict, format_reward):
    with pytest.raises(ValueError, match="must be"):
        equations.verifier_reward(verdict, True, format_reward, 0.8)


# Eq. 9


def test_eq9_class_weights_keep_the_batch_mean_at_one():
    # numbers 1 and 4: 1/√1 : 1/√4 = 2 : 1. Mean over the batch (1 · 2 + 4 · 1) / 5 = 6/5, so s_+ = 5/3 and s_− = 5/6
    close(equations.class_weights(1, 4, 1, 4), [5 / 3, 5 / 6])
    # the averages set the ratio, the batch the constant: 3 right and 2 wrong, (3 · 2 + 2 · 1) / 5 = 8/5
    close(equations.class_weights(1, 4, 3, 2), [2 / (8 / 5), 1 / (8 / 5)])


def test_eq9_other_class_weights():
    # 1/1 : 1/4 = 4 : 1; mean (1 · 4 + 4 · 1) / 5 = 8/5
    close(equations.class_weights(1, 4, 1, 4, "inverse"), [2.5, 0.625])
    close(equations.class_weights(1, 4, 1, 4, "off"), [1.0, 1.0])
    assert ClassWeightEma(decay=0.8, method="off").weights(3, 9) == (1.0, 1.0)


def test_eq9_class_weights_stay_bounded_and_finite():
    assert equations.class_weights(0, 8, 0, 8).wrong == 1.0
    # an average of 0.01 counts as 1: ratio √100 : 1 = 10 : 1; mean (1 · 10 + 99 · 1) / 100 = 1.09
    close(equations.class_weights(0.01, 100, 1, 99), [10 / 1.09, 1 / 1.09])
    with pytest.raises(ValueError, match="without solutions"):
        equations.class_weights(1, 1, 0, 0)
    with pytest.raises(ValueError, match="finite"):
        equations.class_weights(NAN, 1, 1, 1)


def test_eq9_moving_average():
    ema = ClassWeightEma(decay=0.8)
    close(ema.weights(1, 4), [5 / 3, 5 / 6])  # the first batch stands for itself
    ema.update(1, 4)
    close([ema.average_right, ema.average_wrong], [1.0, 4.0])
    ema.update(6, 9)  # 0.8 · 1 + 0.2 · 6 = 2, 0.8 · 4 + 0.2 · 9 = 5
    close([ema.average_right, ema.average_wrong], [2.0, 5.0])
    restored = ClassWeightEma(decay=0.8)
    restored.load_state_dict(ema.state_dict())
    assert restored == ema


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_plus_plus"])
def test_eq9_weights_after_normalising(algorithm):
    # rewards 1, 0: mean 1/2, unbiased variance 1/4 + 1/4 = 1/2; so ±(1/2) / √(1/2) = ±1/√2, times 3
    advantages = verifier_advantages(np.array([1.0, 0.0]), np.array([3.0, 3.0]), algorithm)
    close(advantages, [3 / math.sqrt(2), -3 / math.sqrt(2)])


def test_eq9_rloo():
    close(verifier_advantages(np.array([1.0, 0.0]), np.array([3.0, 3.0]), "rloo"), [3.0, -3.0])


# Whole batches


def generator_batch(algorithm="grpo", alpha=0.5, **changes):
    """Two questions, two solutions each, interleaved; their advantages.

    A: right with one step judged right (+1), wrong with two steps judged wrong (−1/2 each); see test_eq5.
    B: both wrong; one response without steps, one cut off inside its second step, so that it has one (judged right).
    """
    columns = {
        "groups": ["A", "B", "A", "B"],
        "correct": [True, False, False, False],
        "judgements": [[1], [], [-1, -1], [1]],
        "ends": [[1], [], [0, 2], [1]],
        "lengths": [3, 2, 3, 4],
        **changes,
    }
    return advantages_of(for_generator(algorithm), solutions(**columns, alpha=alpha))


def test_generator_batch_grpo():
    result = generator_batch()
    half = 1 / math.sqrt(2)  # rewards 1, 0 of A, as in test_eq9_weights_after_normalising; B's are equal
    close([one[0] for one in generator_batch(alpha=0.0)], [half, 0, -half, 0])
    root3 = math.sqrt(3)
    step = 2 / root3
    close(result[0], [(half + step) / 2, (half + step) / 2, half / 2])
    close(result[1], [0, 0])
    # steps end at 0 and 2 with −1/√3 each: token 0 has both, tokens 1 and 2 the second
    close(result[2], [(-half - 2 / root3) / 2, (-half - 1 / root3) / 2, (-half - 1 / root3) / 2])
    close(result[3], [0.5, 0.5, 0, 0])  # a step that is alone in its group keeps its reward, 1


def test_generator_batch_rloo():
    result = generator_batch("rloo")
    close([one[0] for one in generator_batch("rloo", 0.0)], [1, 0, -1, 0])
    # steps of A: 1 less the others' mean −1/2 is 3/2; −1/2 less (1 − 1/2) / 2 is −3/4, twice
    close(result[0], [(1 + 1.5) / 2, (1 + 1.5) / 2, 1 / 2])
    close(result[2], [(-1 - 1.5) / 2, (-1 - 0.75) / 2, (-1 - 0.75) / 2])
    # the only step of B has none to be compared with
    assert [result[i].tolist() for i in (1, 3)] == [[0.0] * 2, [0.0] * 4]


def test_generator_batch_reinforce_normalises_over_the_batch():
    result = generator_batch("reinforce_plus_plus")
    # outcome rewards 1, 0, 0, 0 of the batch, as in test_eq4_grpo
    close([one[0] for one in generator_batch("reinforce_plus_plus", 0.0)], [1.5, -0.5, -0.5, -0.5])
    # sums of step rewards at the tokens of the three judged solutions: 1 1 0, −1 −1/2 −1/2, 1 1 0 0; ten numbers, mean
    # 1/5; squares 4 + 1 + 1/2 = 11/2, less 10 / 25 = 2/5: unbiased variance (51/10) / 9 = 17/30
    sums = [np.array([1, 1, 0]), np.array([-1, -0.5, -0.5]), np.array([1, 1, 0, 0])]
    for i, sums_T, outcome in zip((0, 2, 3), sums, (1.5, -0.5, -0.5), strict=True):
        close(result[i], 0.5 * outcome + 0.5 * (sums_T - 0.2) / math.sqrt(17 / 30))
    close(result[1], [-0.25, -0.25])  # not judged: no step part, and not in the statistics


def test_generator_batch_does_not_depend_on_order_or_group_names():
    result = generator_batch(
        groups=[7, 7, 3, 3],
        correct=[True, False, False, False],
        judgements=[[1], [-1, -1], [], [1]],
        ends=[[1], [0, 2], [], [1]],
        lengths=[3, 3, 2, 4],
    )
    expected = generator_batch()
    for i, j in enumerate([0, 2, 1, 3]):
        close(result[i], expected[j])


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_generator_batch_with_nothing_to_prefer_is_all_zero(algorithm):
    result = generator_batch(algorithm, correct=[True] * 4, judgements=[[1]] * 4, ends=[[1]] * 4)
    assert all((advantages == 0.0).all() for advantages in result)


@pytest.mark.parametrize(
    "changes",
    [
        {"judgements": [[1, 1], [], [-1, -1], [1]]},  # more judgements than steps
        {"judgements": [[1], [], [-1], [1]]},  # fewer
        {"correct": [True]},
        {"ends": [[3], [], [0, 2], [1]]},  # past the response's 3 tokens
        {"judgements": [[NAN], [], [-1, -1], [1]]},
    ],
)
def test_generator_batch_refuses_what_does_not_fit(changes):
    with pytest.raises(ValueError):
        generator_batch(**changes)


def verifier_batch():
    """Two solutions, two verifications each: the first right and judged 1, 0; the second wrong and judged −1, 0."""
    weights = ClassWeights(right=1.5, wrong=0.5)
    forms, lengths = [1.0, 1.0, 0.5, 1.0], [2, 1, 1, 3]
    return verifications(["a", "a", "b", "b"], [True, True, False, False], [1, 0, -1, 0], forms, lengths, weights, 0.8)


def test_verifier_batch_grpo():
    close(verifier_batch().rewards, [1.8, 0.8, 0.4, 1.8])
    result = advantages_of(for_verifier(), verifier_batch())
    half = 1 / math.sqrt(2)  # any two different numbers normalise to ±1/√2
    close(result[0], [1.5 * half] * 2)
    close(result[1], [-1.5 * half])
    close(result[2], [-0.5 * half])
    close(result[3], [0.5 * half] * 3)


def test_verifier_batch_rloo():
    result = advantages_of(for_verifier("rloo"), verifier_batch())
    close([advantages[0] for advantages in result], [1.5, -1.5, 0.5 * -1.4, 0.5 * 1.4])


def test_verifier_batch_reinforce_normalises_over_the_batch():
    # mean of 1.8, 0.8, 0.4, 1.8 = 1.2; deviations 0.6, −0.4, −0.8, 0.6; squares 0.36 + 0.16 + 0.64 + 0.36 = 1.52
    std = math.sqrt(1.52 / 3)
    result = advantages_of(for_verifier("reinforce_plus_plus"), verifier_batch())
    expected = [1.5 * 0.6 / std, 1.5 * -0.4 / std, 0.5 * -0.8 / std, 0.5 * 0.6 / std]
    close([advantages[0] for advantages in result], expected)


def test_solutions_are_counted_once_each():
    assert num_right_and_wrong_solutions(["a", "a", "b", "c"], [True, True, False, False]) == (1, 2)


OFFICIAL = json.loads((Path(__file__).parents[2] / "data/official_advantages.json").read_text())


of_official = pytest.mark.parametrize("batch", OFFICIAL, ids=[f"{n}-{b['algorithm']}" for n, b in enumerate(OFFICIAL)])


def assert_official(batch, advantages_N_T) -> None:
    """What compute_grpo_advantage and compute_rloo_advantage of github.com/kaiwenzha/RL-Tango give for these rows.

    GRPO there adds 1e-6 to each deviation, in float32: the largest difference is 1.63e-5. That of RLOO is 9e-7.
    """
    tolerance = {"grpo": 1.7e-5, "rloo": 1e-6}[batch["algorithm"]]
    for row, advantages_T in zip(batch["rows"], advantages_N_T, strict=True):
        np.testing.assert_allclose(advantages_T, row["advantages"], rtol=0, atol=tolerance)


@of_official
def test_advantages_are_those_of_the_authors_functions(batch):
    """Where a row has another number of judgements than of steps, its solution has no step rewards there."""
    rows = batch["rows"]
    judged = [len(row["judgements"]) == len(row["step_ends"]) for row in rows]
    given = solutions(
        [row["group"] for row in rows],
        [row["outcome"] == 1.0 for row in rows],
        [row["judgements"] if complete else [] for row, complete in zip(rows, judged, strict=True)],
        [row["step_ends"] for row in rows],
        [row["length"] for row in rows],
        batch["alpha"],
    )
    assert_official(batch, advantages_of(for_generator(batch["algorithm"], step_scale=batch["step_scale"]), given))


def scored_solution(row) -> ScoredSolution:
    """A row of the authors' batches as a solution and a verification that were written and read."""
    steps = "".join(f"<step>{k}</step>" for k in range(len(row["step_ends"])))
    solution = parse_solution(f"<think>{steps}</think><answer>\\boxed{{0}}</answer>")
    judgements = "".join(f"<step>{CORRECT if y > 0 else INCORRECT}</step>" for y in row["judgements"])
    text = f"<step_verification>{judgements}</step_verification><final_verification>{CORRECT}</final_verification>"
    verification = read_verification(text, solution, "authors")
    return ScoredSolution(
        row["group"], solution, row["outcome"] == 1.0, row["outcome"], row["step_ends"], row["length"], verification
    )


@of_official
def test_training_scores_the_authors_batches_as_they_do(batch):
    """Which solutions have step rewards is decided by what training itself goes by."""
    hook = for_generator(batch["algorithm"], step_scale=batch["step_scale"])
    read = [scored_solution(row) for row in batch["rows"]]
    scored = score_solutions(read, AlgorithmConfig(), hook, Moment(alpha=batch["alpha"]))
    assert_official(batch, scored.advantages_N_T)


def test_the_authors_batches_have_what_matters():
    assert len(OFFICIAL) == 24 and {batch["algorithm"] for batch in OFFICIAL} == {"grpo", "rloo"}
    rows = [row for batch in OFFICIAL for row in batch["rows"]]
    assert sum(len(row["judgements"]) != len(row["step_ends"]) for row in rows) > 10


def test_a_verification_that_was_cut_off_does_not_punish_a_right_solution():
    """Ten right steps, six of them judged, beside a wrong solution: the outcome alone counts for the first."""
    batch = solutions(["q", "q"], [True, False], [[], [1, -1]], [[], [0, 1]], [20, 3], 0.5)
    close(advantages_of(for_generator(), batch)[0], np.full(20, 0.5 / math.sqrt(2)))
