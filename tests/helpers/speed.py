"""Ratios of two ways on the same machine, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

REPEATS = 5


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def cpu_ratio(ours: Callable[[], Any], theirs: Callable[[], Any]) -> float:
    """The median over turns, after one to warm up."""
    turns = [cpu_seconds(ours) / cpu_seconds(theirs) for _ in range(REPEATS + 1)]
    return statistics.median(turns[1:])
