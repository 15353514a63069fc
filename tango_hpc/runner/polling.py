"""Asking again and again until an answer comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def poll(ask: Callable[[], Answer], seconds: float, every: float) -> Answer:
    """Call `ask` every `every` seconds until its answer is true or `seconds` are over; return the last answer."""
    until = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < until:
        time.sleep(every)
    return answer
