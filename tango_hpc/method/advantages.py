"""From the rewards of a whole generator or verifier step to the advantage of every token.

The training loop and `tango score` both come here, so what a dump says can be recomputed from it. Plain lists in,
NumPy out; which responses are normalised together (the rollouts of a question, or with REINFORCE++ the whole
batch) is decided here and nowhere else.

Shape suffixes: `base.types`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tango_hpc.method import equations
from tango_hpc.method.equations import Algorithm, ClassWeights, FloatArray
from tango_hpc.method.prof import kept_rollouts


@dataclass(frozen=True)
class GeneratorAdvantages:
    """The results of Eqs. 2–7 for the N solutions of a generator step.

    `step_rewards_N_K`: of several verifications of a solution the mean of those that give it step rewards. `kept_N`:
    which solutions are to be trained on; the others, left out by PROF, have advantages of 0.
    """

    outcome_rewards_N: FloatArray
    step_rewards_N_K: list[FloatArray]
    outcome_advantages_N: FloatArray
    kept_N: NDArray[np.bool_]
    advantages_N_T: list[FloatArray]


@dataclass(frozen=True)
class VerifierAdvantages:
    """The results of Eqs. 8 and 9 for the N verifications of a verifier step."""

    rewards_N: FloatArray
    class_weights_N: FloatArray
    advantages_N_T: list[FloatArray]


def generator_advantages_batch(
    *,
    group_ids_N: Sequence[Hashable],
    correct_N: Sequence[bool],
    judgements_N_K: Sequence[Sequence[int]],
    step_end_tokens_N_K: Sequence[Sequence[int]],
    response_lengths_N: Sequence[int],
    alpha: float,
    algorithm: Algorithm,
    step_scale: float = 1.0,
    outcome_rewards_N: FloatArray | None = None,
    num_verifications: int = 1,
    prof_rollouts: int | None = None,
    blend: Literal["advantages", "rewards"] = "advantages",
) -> GeneratorAdvantages:
    """Eqs. 2–7 for a whole generator step; responses with the same group id answer the same question.

    `judgements_N_K` holds +1 or −1 for each step of the solution, `step_end_tokens_N_K` the index I(k) into the
    response of each step's last token; both are empty for a solution whose steps were not all judged once, and for all
    without a verifier, where `alpha` is 0. `outcome_rewards_N` takes the place of Eq. 2's where a switch asks for
    others. Groups need neither be contiguous nor equally large. Raises ValueError where the inputs do not fit each
    other.

    With `num_verifications` V above 1 these two columns have V entries for each solution, solution after solution. As
    in the authors' code Eq. 5 is then over the step rewards of all verifications, and a solution's step advantages are
    the mean over its V, those without step rewards counting as 0.

    `prof_rollouts`: of each group only so many solutions are compared and kept (`successors.prof`); `alpha` is 0 then.

    `blend`: "rewards" merges outcome and step rewards before they are normalised (`equations.merged_rewards`), instead
    of Eq. 7.
    """
    _check_lengths(len(group_ids_N), correct_N, response_lengths_N)
    _check_lengths(len(group_ids_N) * num_verifications, judgements_N_K, step_end_tokens_N_K)
    if outcome_rewards_N is None:
        outcome_rewards_N = equations.outcome_rewards(correct_N)
    step_rewards_N_K, step_advantages_N_T = _over_verifications(
        group_ids_N, judgements_N_K, step_end_tokens_N_K, response_lengths_N, algorithm, num_verifications
    )
    kept_N = np.ones(len(group_ids_N), dtype=bool)
    if prof_rollouts is not None:
        assert alpha == 0.0, "PROF chooses by the step rewards instead of blending them in"
        kept_N = kept_rollouts(group_ids_N, correct_N, step_rewards_N_K, prof_rollouts)
    compared_rewards_N = outcome_rewards_N
    if blend == "rewards":
        compared_rewards_N, alpha = equations.merged_rewards(outcome_rewards_N, step_rewards_N_K, alpha), 0.0
    outcome_advantages_N = np.zeros(len(group_ids_N))
    for members in _populations(group_ids_N, algorithm):
        compared = [i for i in members if kept_N[i]]
        outcome_advantages_N[compared] = equations.outcome_advantages(compared_rewards_N[compared], algorithm)
    advantages_N_T = [
        equations.generator_advantages(outcome_advantages_N[i], step_advantages_T, alpha, step_scale)
        for i, step_advantages_T in enumerate(step_advantages_N_T)
    ]
    return GeneratorAdvantages(outcome_rewards_N, step_rewards_N_K, outcome_advantages_N, kept_N, advantages_N_T)


def _over_verifications(
    group_ids_N: Sequence[Hashable],
    judgements_NV_K: Sequence[Sequence[int]],
    step_end_tokens_NV_K: Sequence[Sequence[int]],
    response_lengths_N: Sequence[int],
    algorithm: Algorithm,
    num_verifications: int,
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Return step rewards (Eq. 4) and step advantages (Eqs. 5, 6) of N solutions, means over the V verifications."""
    verified = [i for i in range(len(group_ids_N)) for _ in range(num_verifications)]  # the solution of each
    rewards_NV_K = [equations.step_rewards(judgements_K) for judgements_K in judgements_NV_K]
    advantages_NV_T = _step_advantages(
        [group_ids_N[i] for i in verified],
        rewards_NV_K,
        step_end_tokens_NV_K,
        [response_lengths_N[i] for i in verified],
        algorithm,
    )
    of_solution_N = [slice(i * num_verifications, (i + 1) * num_verifications) for i in range(len(group_ids_N))]
    rewards_N_K = [
        _mean([rewards_K for rewards_K in rewards_NV_K[its] if len(rewards_K)] or [np.zeros(0)])
        for its in of_solution_N
    ]
    return rewards_N_K, [_mean(advantages_NV_T[its]) for its in of_solution_N]


def _step_advantages(
    group_ids_N: Sequence[Hashable],
    step_rewards_N_K: Sequence[FloatArray],
    step_end_tokens_N_K: Sequence[Sequence[int]],
    response_lengths_N: Sequence[int],
    algorithm: Algorithm,
) -> list[FloatArray]:
    """Eqs. 5 and 6 for N verified solutions: the step advantages of their tokens."""
    normalized_N_K = [np.zeros(0)] * len(group_ids_N)
    for members in _populations(group_ids_N, algorithm):
        normalized = equations.normalized_step_rewards([step_rewards_N_K[i] for i in members], algorithm)
        for i, normalized_K in zip(members, normalized, strict=True):
            normalized_N_K[i] = normalized_K
    step_advantages_N_T = [
        equations.step_advantages(normalized_K, ends_K, num_tokens)
        for normalized_K, ends_K, num_tokens in zip(
            normalized_N_K, step_end_tokens_N_K, response_lengths_N, strict=True
        )
    ]
    if algorithm == "reinforce++":
        judged = [i for i, rewards_K in enumerate(step_rewards_N_K) if len(rewards_K)]
        whitened = equations.whitened_step_advantages([step_advantages_N_T[i] for i in judged])
        for i, whitened_T in zip(judged, whitened, strict=False):  # one empty part where nothing was judged
            step_advantages_N_T[i] = whitened_T
    return step_advantages_N_T


def verifier_advantages_batch(
    *,
    group_ids_N: Sequence[Hashable],
    solution_correct_N: Sequence[bool],
    verdicts_N: Sequence[int],
    format_rewards_N: Sequence[float],
    response_lengths_N: Sequence[int],
    weights: ClassWeights,
    gamma: float,
    algorithm: Algorithm,
) -> VerifierAdvantages:
    """Eqs. 8 and 9 for a whole verifier step; verifications with the same group id judge the same solution.

    `verdicts_N` are 1 (right), 0 (wrong) or −1 (missing). `weights` come from `ClassWeightEma.weights`, with the
    numbers of right and wrong *solutions* of this batch. Raises ValueError where the inputs do not fit each other.
    """
    _check_lengths(len(group_ids_N), solution_correct_N, verdicts_N, format_rewards_N, response_lengths_N)
    rewards_N = np.array(
        [
            equations.verifier_reward(verdict, correct, format_reward, gamma)
            for verdict, correct, format_reward in zip(verdicts_N, solution_correct_N, format_rewards_N, strict=True)
        ]
    )
    class_weights_N = np.where(np.asarray(solution_correct_N, dtype=bool), weights.right, weights.wrong)
    relative_N = np.zeros(len(rewards_N))
    for members in _populations(group_ids_N, algorithm):
        relative_N[members] = equations.verifier_advantages(rewards_N[members], class_weights_N[members], algorithm)
    advantages_N_T = [np.full(n, value) for n, value in zip(response_lengths_N, relative_N, strict=True)]
    return VerifierAdvantages(rewards_N, class_weights_N, advantages_N_T)


def num_right_and_wrong_solutions(
    group_ids_N: Sequence[Hashable], solution_correct_N: Sequence[bool]
) -> tuple[int, int]:
    """Return how many of the solutions that a verifier step judges are right and wrong: what `ClassWeightEma`
    counts.
    """
    correct_by_group = dict(zip(group_ids_N, solution_correct_N, strict=True))
    num_right = sum(bool(correct) for correct in correct_by_group.values())
    return num_right, len(correct_by_group) - num_right


def _mean(arrays: Sequence[FloatArray]) -> FloatArray:
    """Return the mean of arrays of one length. NumPy's own takes ten times as long for the one or the few that there
    are.
    """
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"verifications of one solution differ in length: {[len(array) for array in arrays]}")
    return sum(arrays[1:], start=arrays[0]) / len(arrays)


def _populations(group_ids_N: Sequence[Hashable], algorithm: Algorithm) -> list[list[int]]:
    """Return the indices that are normalised together: each group, or the whole batch with REINFORCE++."""
    if algorithm == "reinforce++":
        return [list(range(len(group_ids_N)))]
    members: dict[Hashable, list[int]] = {}
    for i, group_id in enumerate(group_ids_N):
        members.setdefault(group_id, []).append(i)
    return list(members.values())


def _check_lengths(num_responses: int, *columns: Sequence[object]) -> None:
    lengths = [len(column) for column in columns]
    if num_responses == 0 or any(length != num_responses for length in lengths):
        raise ValueError(f"a batch needs as many entries in every column, got {[num_responses, *lengths]}")
