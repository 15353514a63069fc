"""How often Slurm is asked about a run that a user waits for: its controller serves all users."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tango_hpc.base.run.directory import RunDirectory

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 20.0


class Asking:
    """Says when to ask again: at once when an attempt of one of the runs has started or ended, else ever more
    rarely.
    """

    def __init__(self, directories: Sequence[RunDirectory]) -> None:
        self._files = [file for directory in directories for file in (directory.attempts_file, directory.jobs_file)]
        self._seen: list[tuple[int, int] | None] = []
        self._pause = FIRST_SECONDS
        self._due = 0.0

    def is_due(self) -> bool:
        """Return whether it is time to ask; the caller asks then."""
        now = time.monotonic()
        seen = [_mark(file) for file in self._files]
        if seen != self._seen:
            self._seen, self._pause = seen, FIRST_SECONDS
        elif now < self._due:
            return False
        self._due = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_SECONDS)
        return True


def _mark(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
