"""Solutions and their verifications as Eqs. 2 to 7 see them, for training and for `tango score` alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tango_hpc.advantages import GeneratorAdvantages, generator_advantages_batch
from tango_hpc.config.schema import AlgorithmConfig
from tango_hpc.equations import outcome_rewards
from tango_hpc.protocol.solution import Solution
from tango_hpc.protocol.verification import Verification


@dataclass(frozen=True)
class ScoredSolution:
    """A solution of the group `group_id` with I(k) and its number of tokens, and its verification, if there is one."""

    group_id: str
    solution: Solution
    correct: bool
    step_end_tokens: Sequence[int]
    num_tokens: int
    verification: Verification | None


def score_solutions(
    solutions_N: Sequence[ScoredSolution], settings: AlgorithmConfig, alpha: float
) -> GeneratorAdvantages:
    """Eqs. 2–7 by a config's settings. A solution that was not verified completely has no step rewards.

    Raises ValueError where a solution's parts do not fit each other.
    """
    judged_N = [
        (read.verification.judgements, read.step_end_tokens)
        if read.verification is not None and read.verification.is_complete
        else ([], [])
        for read in solutions_N
    ]
    correct_N = [read.correct for read in solutions_N]
    return generator_advantages_batch(
        group_ids_N=[read.group_id for read in solutions_N],
        correct_N=correct_N,
        judgements_N_K=[judgements_K for judgements_K, _ in judged_N],
        step_end_tokens_N_K=[ends_K for _, ends_K in judged_N],
        response_lengths_N=[read.num_tokens for read in solutions_N],
        alpha=alpha,
        algorithm=settings.name,
        step_scale=settings.step_advantage_scale,
        outcome_rewards_N=outcome_rewards(
            correct_N,
            [-1 if read.verification is None else read.verification.final for read in solutions_N],
            [read.solution.well_formed for read in solutions_N],
            ground_truth_weight=settings.ground_truth_weight,
            format_weight=settings.generator_format_weight,
        ),
    )
