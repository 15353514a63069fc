"""Asking a run to save and end: RUN/control/stop, one `StopRequest` as JSON, and how the ranks come to obey it.

A rank learns of a stop in two ways: rank 0 sees the file at a safe point, or any rank received SIGTERM, SIGUSR2 or
SIGINT itself (`scancel --signal` reaches the ranks, not the supervisor). Either way the flag rides an all-reduce, so
that every rank stops at the same safe point. torch is imported only for that.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Literal

from tango_hpc.control.heartbeat import Heart
from tango_hpc.files import write_atomically
from tango_hpc.run.directory import RunDirectory

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


@dataclass(frozen=True)
class StopRequest:
    """Who asked, and why. What a user asks for ends the run for good; after a supervisor's, a job requeues itself."""

    by: Literal["user", "supervisor"]
    why: str


def request_stop(directory: RunDirectory, request: StopRequest) -> None:
    """Have the run save at its next safe point and end. The supervisor's request replaces none that is there."""
    if request.by == "user" or not directory.stop_file.exists():
        write_atomically(directory.stop_file, json.dumps(asdict(request)))


def read_stop_request(directory: RunDirectory) -> StopRequest | None:
    """What was asked for, if anything. A file that somebody made by hand is a user's request."""
    try:
        text = directory.stop_file.read_text()
    except FileNotFoundError:
        return None
    try:
        return StopRequest(**json.loads(text))
    except (ValueError, TypeError):
        return StopRequest("user", text.strip() or "the file control/stop")


class StopSignal(Heart):
    """What the training loop polls at its safe points: this rank's heartbeat, which hears of a stop.

    `agree` maps this rank's flag to "any rank's flag" and is a collective; by default the one over all ranks.
    """

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        super().__init__(directory, rank)
        self.agree: Callable[[bool], bool] | None = None
        self._stopping = False
        self._received: str | None = None

    def start(self) -> None:
        """Install the signal handlers and start the heartbeat; call it before anything slow."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)
        super().start()

    def check(self, phase: str) -> bool:
        """Whether to save and stop now; every rank gets the same answer. A collective. `phase` is what comes next.

        Once it was True it stays True.
        """
        self.reached_safe_point = True
        self.enter(phase)
        if self.agree is None:
            from tango_hpc.parallel.collectives import any_rank

            self.agree = any_rank
        if not self._stopping:
            asked = self._received is not None or (self.rank == 0 and self.directory.stop_file.exists())
            self._stopping = self.agree(asked)
        return self._stopping

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
