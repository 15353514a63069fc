"""The learning-rate schedule. Pure Python."""

from __future__ import annotations

import math

from tango_hpc.base.config.roles import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return learning rate of optimizer step `step`, counted from 0.

    It rises linearly over the first `warmup_ratio` of the steps, then stays, or falls to `final_ratio` of itself at
    the last step along a cosine or an exponential.
    """
    warmup_steps = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps - 1, 1), 1.0)
    if config.schedule == "cosine":
        share = config.final_ratio + (1 - config.final_ratio) * (1 + math.cos(math.pi * progress)) / 2
    elif config.schedule == "exponential":
        share = config.final_ratio**progress
    else:
        share = 1.0
    return config.learning_rate * share
