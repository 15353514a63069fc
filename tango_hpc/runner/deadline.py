"""The time at which the machine takes a run's ranks away, and the time that the run was awake, by this
process's clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tango_hpc.base.errors import UserError

REFRESH_SECONDS = 600.0
RETRY_SECONDS = 60.0
# An answer that is to be acted on is no older.
CONFIRM_SECONDS = 30.0


class Deadline:
    """The end of the job, which may be moved while it runs, or not be known for a while.

    `ask` gives the seconds that are left, None where there is no limit, and raises UserError where that cannot be
    learnt. They are counted down by
    the monotonic clock of this process, so that no two clocks are compared. Until there is an answer no end is near:
    Slurm's signal is still there.
    """

    def __init__(self, ask: Callable[[], float | None]) -> None:
        self._ask = ask
        self._end: float | None = None
        self._asked = -math.inf
        self._good_for = 0.0

    def left(self) -> float | None:
        """Return seconds, as far as is known; None where there is no limit, or none is known."""
        return None if self._end is None else self._end - time.monotonic()

    def is_near(self, seconds: float) -> bool:
        """Return whether fewer than `seconds` are left.

        Before it says so it asks again, as the limit may have been extended, or the job suspended; without an answer
        what was known last holds.
        """
        age = time.monotonic() - self._asked
        if age > self._good_for or (age > CONFIRM_SECONDS and self._is_within(seconds + CONFIRM_SECONDS)):
            self._refresh()
        return self._is_within(seconds)

    def _is_within(self, seconds: float) -> bool:
        left = self.left()
        return left is not None and left < seconds

    def _refresh(self) -> None:
        self._asked = time.monotonic()
        try:
            left = self._ask()
        except UserError:  # of Slurm, or there is none of its commands in this container
            self._good_for = RETRY_SECONDS
            return
        self._end = None if left is None else self._asked + left
        self._good_for = REFRESH_SECONDS


class AwakeClock:
    """Seconds that this process was awake: what it slept through with its ranks, while Slurm had suspended the job,
    counts little.
    """

    def __init__(self, longest_gap_seconds: float) -> None:
        self._longest_gap = longest_gap_seconds
        self._seen = time.monotonic()
        self._awake = 0.0
        self.longest_pause = 0.0  # between two looks

    def now(self) -> float:
        """Look at it often: of a longer time between two looks than `longest_gap_seconds` only that much counts."""
        seen = time.monotonic()
        gap = seen - self._seen
        self._seen = seen
        self._awake += min(gap, self._longest_gap)
        self.longest_pause = max(self.longest_pause, gap)
        return self._awake
