"""The role of each optimizer step (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

from tango_hpc.base.config import Config


def role_schedule(config: Config) -> list[str]:
    """Return the role of every optimizer step: the verifier's warm-up, then N_g generator and N_v verifier steps in
    turn.

    It ends with the last generator step. A role that is not trainable has its steps left out: with a frozen generator
    the verifier takes the steps that it would take beside a training one.
    """
    train = config.train
    schedule = ["verifier"] * train.verifier_warmup_steps
    for num_done in range(train.generator_steps):
        schedule.append("generator")
        if (num_done + 1) % train.generator_steps_per_cycle == 0 and num_done + 1 < train.generator_steps:
            schedule += ["verifier"] * train.verifier_steps_per_cycle
    trainable = {name for name, role in config.roles.items() if role.trainable}
    return [role for role in schedule if role in trainable]


def num_trained(schedule: Sequence[str], role: str, config: Config) -> int:
    """Return how many of these steps train `role`; with joint updates all train the verifier."""
    return len(schedule) if config.train.joint and role == "verifier" else schedule.count(role)
