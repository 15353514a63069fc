"""The name of one process of a run. Pure Python."""

from __future__ import annotations

import re
from typing import NamedTuple

# How many ranks a task is, from RANK on, where it is more than one; set by the launcher of a single machine.
RANKS_OF_TASK = "TANGO_RANKS_OF_TASK"

_STEM = re.compile(r"rank_(?P<rank>\d+)(\.(?P<role>\w+))?")


class Worker(NamedTuple):
    """The process of `role` on `rank`; without a role, the process that started it: the rank as a whole."""

    rank: int
    role: str = ""

    @property
    def stem(self) -> str:
        """The name of the worker's files, without an ending."""
        return f"rank_{self.rank:05d}" + (f".{self.role}" if self.role else "")

    @classmethod
    def from_stem(cls, stem: str) -> Worker:
        """Return the worker that a file's stem names."""
        match = _STEM.fullmatch(stem)
        assert match is not None, stem
        return cls(int(match["rank"]), match["role"] or "")

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.role})" if self.role else "")
