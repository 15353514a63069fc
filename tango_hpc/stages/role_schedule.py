"""Which role takes which optimizer step (Algorithm 1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tango_hpc.base.config import Config


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

    Until at least that share of the generator's solutions was right and as much wrong, in the last `WINDOW` steps
    together, the generator goes on first, with the verifier steps of its cycle. `after`: generator steps before it.
    """

    WINDOW = 5

    def __init__(self, config: Config) -> None:
        self._config = config
        self.after = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=self.WINDOW)  # right solutions of all, of each step

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

    def observe(self, correct_N: Sequence[bool]) -> None:
        """Take in which of a step's N solutions are right: all that were drawn, also those that no verifier judges."""
        self._recent.append((sum(correct_N), len(correct_N)))

    def wait(self, step: int) -> None:
        """Put the warm-up off by a generator step if it is to begin after `step` optimizer steps and must wait."""
        least, due = self._config.train.warmup_min_share, self.steps
        if least is None or not due or step != due.start:
            return
        num_right, num_drawn = (sum(column) for column in zip((0, 0), *self._recent, strict=True))
        if not num_drawn or not least <= num_right / num_drawn <= 1 - least:
            self.after += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; JSON."""
        return {"after": self.after, "recent": [*map(list, self._recent)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.after = state["after"]
        self._recent = deque(((right, drawn) for right, drawn in state["recent"]), maxlen=self.WINDOW)
