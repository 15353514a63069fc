"""The loss settings of a role's updates, and the metrics of an update."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.method.hooks import kept_file, load_hook
from tango_hpc.models.trainer.loss import LossSettings, UpdateStats
from tango_hpc.models.weight_sync.sync import SyncStats


def loss_settings(config: Config, name: str) -> LossSettings:
    """Return the loss that a role's updates in `train` minimise. Raises UserError for a mistake in a file."""
    role, algorithm = config.roles[name], config.algorithm
    correction = algorithm.correction
    return LossSettings(
        loss=load_hook(algorithm.loss, kept_file(config.run.dir, algorithm.loss)),
        correction=None if correction is None else load_hook(correction, kept_file(config.run.dir, correction)),
        level="token" if correction is None else correction.level,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        max_logprob_gap=config.train.max_logprob_gap,
        temperature=role.temperature,
        max_response_tokens=role.max_response_tokens,
        rate=config.train.verifier_learning_rate_scale if name == "verifier" else 1.0,
    )


def update_metrics(updates: Sequence[UpdateStats], sync: SyncStats, loss: LossSettings) -> dict[str, Any]:
    """Return the updates of one batch, in means, and the weight syncs of the step."""
    mean = statistics.fmean
    return {
        "loss": mean(update.loss for update in updates),
        "grad_norm": mean(update.grad_norm for update in updates),
        "kl": mean(update.kl for update in updates) if loss.kl_coef else None,
        "entropy": mean(update.entropy for update in updates),
        "learning_rate": updates[-1].learning_rate,
        "skipped": any(update.skipped for update in updates),
        "logprob_gap/mean_abs": updates[0].logprob_gap_mean,
        "logprob_gap/max_abs": updates[0].logprob_gap_max,
        "operations": sum(update.operations for update in updates),
        "tokens/trained": sum(update.num_tokens for update in updates),
        "reshard/bytes_sent": sync.bytes_sent,
        "reshard/bytes_local": sync.bytes_local,
        "reshard/bytes_minimum": sync.bytes_minimum,
    } | {
        name: (max if reduction == "max" else mean)(update.method[name] for update in updates)
        for name, reduction in loss.reductions.items()
        if name in updates[0].method
    }
