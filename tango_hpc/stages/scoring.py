"""Solutions and their verifications as Eqs. 2 to 7 see them, for training and for `tango score` alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.method.advantages import GeneratorAdvantages, generator_advantages_batch
from tango_hpc.method.equations import outcome_rewards
from tango_hpc.method.vote import majority_vote
from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.verification import Verification


@dataclass(frozen=True)
class ScoredSolution:
    """A solution of the group `group_id` with I(k) and its number of tokens, and its verification, if there is one.

    `score`: Eq. 2, of an answer that is `correct` or not. `others`: further verifications of it, as many for each
    solution of a batch.
    """

    group_id: str
    solution: Solution
    correct: bool
    score: float
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
    given_N_V = [_given(read, settings) for read in solutions_N]
    counts = sorted({len(given_V) for given_V in given_N_V})
    if len(counts) > 1:
        raise ValueError(f"each solution of a batch needs as many verifications, got {counts}")
    judged_NV = [
        (
            (verification.judgements, read.step_end_tokens)
            if verification is not None and verification.is_complete
            else ([], [])
        )
        for read, given_V in zip(solutions_N, given_N_V, strict=True)
        for verification in given_V
    ]
    correct_N = [read.correct for read in solutions_N]
    outcomes_V_N = [
        outcome_rewards(
            [read.score for read in solutions_N],
            [-1 if verification is None else verification.final for verification in given_N],
            [read.solution.well_formed for read in solutions_N],
            ground_truth_weight=settings.ground_truth_weight,
            format_weight=settings.generator_format_weight,
        )
        for given_N in zip(*given_N_V, strict=True)
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
        num_verifications=len(outcomes_V_N),
        prof_rollouts=settings.prof_rollouts,
        blend=settings.blend,
    )


def _given(read: ScoredSolution, settings: AlgorithmConfig) -> list[Verification | None]:
    """Return the verifications of a solution that count, each by itself: all, or their vote; a missing one
    without any.
    """
    if not read.verifications:
        return [None]
    if settings.combine_verifications == "vote":
        return [majority_vote(read.verifications)]
    return [*read.verifications]
