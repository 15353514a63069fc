"""Asking a run to save and end: RUN/control/stop, one `StopRequest` as JSON, and how its processes come to obey it.

They learn of a stop in two ways: one sees the file at a safe point, or any of them received SIGTERM, SIGUSR2 or SIGINT
itself (`scancel --signal` reaches the ranks, not the supervisor). Either way they agree on the flag in a collective, so
that all stop at the same safe point.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from tango_hpc.base.files import Patience, read_replaced, write_atomically
from tango_hpc.base.run.directory import RunDirectory

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


@dataclass(frozen=True)
class StopRequest:
    """A request to stop. A user's request ends the run for good; after a supervisor's, a job requeues itself."""

    by: Literal["user", "supervisor"]
    why: str


def request_stop(directory: RunDirectory, request: StopRequest) -> None:
    """Have the run save at its next safe point and end. The supervisor's request replaces none that is there."""
    if request.by == "user" or not directory.stop_file.exists():
        write_atomically(directory.stop_file, json.dumps(asdict(request)))


def read_stop_request(directory: RunDirectory) -> StopRequest | None:
    """Return the request to stop, if there is one. A file made by hand is a user's request."""
    try:
        text = read_replaced(directory.stop_file).decode(errors="replace")
    except FileNotFoundError:
        return None
    try:
        return TypeAdapter(StopRequest).validate_json(text, strict=True)
    except ValidationError:
        return StopRequest("user", text.strip() or "the file control/stop")


class StopSignal:
    """The answer to "must I stop?" of one process.

    `agree` maps this process's flag to "the flag of any" and is a collective over all processes; the code that joins
    them sets it. `reads_file`: this process looks for the request; one of them does.
    """

    def __init__(self, directory: RunDirectory, *, reads_file: bool) -> None:
        self.agree: Callable[[bool], bool] | None = None
        self._directory, self._reads_file = directory, reads_file
        self._stopping = False
        self._received: str | None = None

    def install(self) -> None:
        """Install the signal handlers."""
        for number in STOP_SIGNALS:
            signal.signal(number, self.receive)

    def must_stop(self) -> bool:
        """Return whether to save and stop now; every process gets the same answer. A collective.

        Once the answer was True it stays True.
        """
        assert self.agree is not None, "set by the code that joins the processes"
        if not self._stopping:
            asked = self._received is not None or (self._reads_file and self._finds_file())
            self._stopping = self.agree(asked)
        return self._stopping

    def _finds_file(self) -> bool:
        """Return whether the file with a request exists.

        Opening the folder has NFS look at it; that a file is missing NFS may remember for a minute.
        """
        with Patience(math.inf), suppress(FileNotFoundError):
            return self._directory.stop_file.name in os.listdir(self._directory.control)
        return False  # the next safe point looks again

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Stop at the next safe point: the handler of `STOP_SIGNALS`."""
        self._received = signal.Signals(number).name
