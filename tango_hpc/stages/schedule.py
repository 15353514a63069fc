"""Which role takes which optimizer step (Algorithm 1)."""

from __future__ import annotations

from tango_hpc.config import Config


def role_schedule(config: Config, warmup_after: int = 0) -> list[str]:
    """The role of every optimizer step: the verifier's warm-up, then N_g generator and N_v verifier steps in turn.

    It ends with the last generator step. A role that is not trainable has its steps left out: with a frozen generator
    the verifier takes the steps that it would take beside a training one. A warm-up that waits (`WarmUp`) comes after
    `warmup_after` generator steps and the verifier steps that follow them; after the last one it would be of no use and
    is left out.
    """
    train = config.train
    schedule: list[str] = []
    for num_done in range(train.generator_steps):
        if num_done == warmup_after:
            schedule += ["verifier"] * train.verifier_warmup_steps
        schedule.append("generator")
        if (num_done + 1) % train.generator_steps_per_cycle == 0 and num_done + 1 < train.generator_steps:
            schedule += ["verifier"] * train.verifier_steps_per_cycle
    trainable = {name for name, role in config.roles.items() if role.trainable}
    return [role for role in schedule if role in trainable]


class WarmUp:
    """When the verifier's warm-up begins: at once, or with `train.warmup_min_share` once there are both kinds.

    Until at least that share of the generator's solutions was right and as much wrong, in the last five steps together,
    the generator goes on first, with the verifier steps of its cycle. `after`: generator steps before it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.after = 0

    @property
    def schedule(self) -> list[str]:
        """The role of every optimizer step, as far as is known now."""
        return role_schedule(self._config, self.after)

    @property
    def steps(self) -> range:
        """The warm-up's optimizer steps, counted from 0."""
        train = self._config.train
        start = 0
        if self.after:  # the generator is trainable, and so is the verifier
            start = self.after + self.after // train.generator_steps_per_cycle * train.verifier_steps_per_cycle
        num_steps = train.verifier_warmup_steps if self.after < train.generator_steps else 0
        return range(start, start + num_steps)

    def wait(self, step: int, right_share: float | None) -> None:
        """Put the warm-up off by a generator step if it is to begin after `step` optimizer steps and must wait."""
        least, due = self._config.train.warmup_min_share, self.steps
        if least is None or not due or step != due.start:
            return
        if right_share is None or not least <= right_share <= 1 - least:
            self.after += 1
