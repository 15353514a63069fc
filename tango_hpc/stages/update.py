"""The loss settings of a role's updates, and the metrics of an update."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.config.roles import RoleConfig
from tango_hpc.models.trainer.loss import LossSettings, UpdateStats
from tango_hpc.models.weight_sync.sync import SyncStats


def loss_settings(config: Config, role: RoleConfig) -> LossSettings:
    """Return the loss that a role's updates in `train` minimise."""
    algorithm = config.algorithm
    return LossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        loss_average=algorithm.loss_average,
        importance_cap=algorithm.importance_cap,
        max_logprob_gap=config.train.max_logprob_gap,
        temperature=role.temperature,
    )


def update_metrics(updates: Sequence[UpdateStats], sync: SyncStats, loss: LossSettings) -> dict[str, Any]:
    """Return the updates of one batch, in means, and the weight syncs of the step."""
    mean = statistics.fmean
    return {
        "loss": mean(update.loss for update in updates),
        "grad_norm": mean(update.grad_norm for update in updates),
        "kl": mean(update.kl for update in updates) if loss.kl_coef else None,
        "entropy": mean(update.entropy for update in updates),
        # The first update of a batch has no ratio but 1: nothing can be clipped in it.
        "clip_share": mean(update.clip_share for update in updates[1:]) if len(updates) > 1 else None,
        "learning_rate": updates[-1].learning_rate,
        "skipped": any(update.skipped for update in updates),
        "logprob_gap/mean_abs": updates[0].logprob_gap_mean,
        "logprob_gap/max_abs": updates[0].logprob_gap_max,
        "operations": sum(update.operations for update in updates),
        "tokens/trained": sum(update.num_tokens for update in updates),
        "reshard/bytes_sent": sync.bytes_sent,
        "reshard/bytes_local": sync.bytes_local,
        "reshard/bytes_minimum": sync.bytes_minimum,
    }
