"""One optimizer step of a role on a scored batch, and its new weights on their way to the engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tango_hpc.config.schema import AlgorithmConfig, TrainConfig
from tango_hpc.errors import CheckFailed
from tango_hpc.policy.policy import LogprobGapError, LossSettings
from tango_hpc.stages.journal import Clock, Journal
from tango_hpc.stages.role import Role
from tango_hpc.types import TrainSequence


def update_role(
    role: Role,
    sequences_N: Sequence[TrainSequence],
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    journal: Journal,
    clock: Clock,
) -> dict[str, Any]:
    """`train.updates_per_batch` updates by Eq. 1 and the weight sync; their metrics. Collective.

    Raises `CheckFailed` where engine and trainer disagree about what was sampled.
    """
    policy, temperature, num_updates = role.policy, role.settings.temperature, train.updates_per_batch
    assert policy is not None, f"the {role.name} is not trained"
    journal.phase("train", role=role.name)
    policy.onload()
    if algorithm.kl_coef > 0:
        with clock("logprobs"):
            reference_N = policy.logprobs(sequences_N, reference=True, temperature=temperature)
            for sequence, reference_T in zip(sequences_N, reference_N, strict=True):
                sequence.reference_logprobs = reference_T.tolist()
    if num_updates > 1:
        with clock("logprobs"):
            old_N = policy.logprobs(sequences_N, temperature=temperature)
            for sequence, old_T in zip(sequences_N, old_N, strict=True):
                sequence.old_logprobs = old_T.tolist()
    loss = LossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coef=algorithm.kl_coef,
        importance_cap=algorithm.importance_cap,
        max_logprob_gap=train.max_logprob_gap,
        temperature=temperature,
    )
    with clock("train"):
        try:
            updates = [policy.update(sequences_N, loss) for _ in range(num_updates)]
        except LogprobGapError as error:
            raise CheckFailed(f"{role.name}: {error}; {role.weight_differences()}") from error
    journal.phase("reshard", role=role.name)
    with clock("reshard"):
        sync = role.sync_weights()
    mean = statistics.fmean
    return {
        "loss": mean(update.loss for update in updates),
        "grad_norm": mean(update.grad_norm for update in updates),
        "kl": mean(update.kl for update in updates),
        "entropy": mean(update.entropy for update in updates),
        # The first update of a batch has no ratio but 1: nothing can be clipped in it.
        "clip_share": mean(update.clip_share for update in updates[1:]) if num_updates > 1 else None,
        "learning_rate": updates[-1].learning_rate,
        "skipped": any(update.skipped for update in updates),
        "logprob_gap/mean_abs": updates[0].logprob_gap_mean,
        "logprob_gap/max_abs": updates[0].logprob_gap_max,
        "tokens/trained": sum(update.num_tokens for update in updates),
        "reshard/bytes_sent": sync.bytes_sent,
        "reshard/bytes_local": sync.bytes_local,
        "reshard/bytes_minimum": sync.bytes_minimum,
    }
