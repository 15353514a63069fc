"""Solutions and their verifications as Eqs. 2 to 7 see them, for training and for `tango score` alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tango_hpc.advantages import GeneratorAdvantages, generator_advantages_batch
from tango_hpc.config.schema import AlgorithmConfig
from tango_hpc.equations import outcome_rewards
from tango_hpc.protocol.solution import Solution
from tango_hpc.protocol.verification import Verification
from tango_hpc.successors.vote import majority_vote


@dataclass(frozen=True)
class ScoredSolution:
    """A solution of the group `group_id` with I(k) and its number of tokens, and its verification, if there is one.

    `others`: further verifications of it, as many for each solution of a batch.
    """

    group_id: str
    solution: Solution
    correct: bool
    step_end_tokens: Sequence[int]
    num_tokens: int
    verification: Verification | None
    others: Sequence[Verification] = ()

    @property
    def verifications(self) -> list[Verification]:
        """All of them, the first one first."""
        return [] if self.verification is None else [self.verification, *self.others]


def score_solutions(
    solutions_N: Sequence[ScoredSolution], settings: AlgorithmConfig, alpha: float
) -> GeneratorAdvantages:
    """Eqs. 2–7 by a config's settings. A solution that was not verified completely has no step rewards.

    `alpha` is without effect where the step rewards choose the rollouts (PROF). Raises ValueError where a solution's
    parts do not fit each other.
    """
    verifications_N_V: list[list[Verification]] = [read.verifications for read in solutions_N]
    if settings.combine_verifications == "vote":
        verifications_N_V = [[majority_vote(read_V)] if read_V else [] for read_V in verifications_N_V]
    counts = {len(read_V) for read_V in verifications_N_V}
    if len(counts) > 1:
        raise ValueError(f"each solution of a batch needs as many verifications, got {sorted(counts)}")
    num_verifications = max(max(counts, default=0), 1)
    judged_NV = [
        (verification.judgements, read.step_end_tokens)
        if verification is not None and verification.is_complete
        else ([], [])
        for read, read_V in zip(solutions_N, verifications_N_V, strict=True)
        for verification in read_V or [None]
    ]
    correct_N = [read.correct for read in solutions_N]
    outcomes_V_N = [
        outcome_rewards(
            correct_N,
            [read_V[v].final if read_V else -1 for read_V in verifications_N_V],
            [read.solution.well_formed for read in solutions_N],
            ground_truth_weight=settings.ground_truth_weight,
            format_weight=settings.generator_format_weight,
        )
        for v in range(num_verifications)
    ]
    return generator_advantages_batch(
        group_ids_N=[read.group_id for read in solutions_N],
        correct_N=correct_N,
        judgements_N_K=[judgements_K for judgements_K, _ in judged_NV],
        step_end_tokens_N_K=[ends_K for _, ends_K in judged_NV],
        response_lengths_N=[read.num_tokens for read in solutions_N],
        alpha=alpha if settings.prof_rollouts is None else 0.0,
        algorithm=settings.name,
        step_scale=settings.step_advantage_scale,
        outcome_rewards_N=np.mean(outcomes_V_N, axis=0),
        num_verifications=num_verifications,
        prof_rollouts=settings.prof_rollouts,
    )
