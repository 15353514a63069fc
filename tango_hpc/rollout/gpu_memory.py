"""Sleep and wake-up of one of several engines in a process.

vLLM's allocator is one per process, and puts all that it has allocated to sleep, or wakes all of it, whichever engine
asks: with a generator and a verifier in one process, waking one would map the KV caches of both. This backend, set in
vLLM's plug-in point for sleep mode, hides the other engines' allocations from the allocator meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

from vllm.device_allocator.sleep_mode_backend import CuMemBackend


class Allocation(Protocol):
    """vLLM's record of one allocation."""

    is_asleep: bool


class OwnMemoryBackend(CuMemBackend):
    """Suspends and resumes the allocations of the one engine that has claimed them."""

    _claimed: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__()
        self._own: set[int] = set()

    def claim(self) -> None:
        """Take what has been allocated and is nobody's: after an engine is created, and before it sleeps."""
        new = set(_allocations()) - self._claimed
        self._own |= new
        self._claimed.update(new)

    def suspend(self, level: int = 1) -> None:
        """Free this engine's GPU memory; `level` as in vLLM."""
        self.claim()
        with pretend(self._others(), is_asleep=True):
            super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Take this engine's GPU memory back, all of it or what has one of `tags`."""
        with pretend(self._others(), is_asleep=False):
            super().resume(tags)

    def _others(self) -> list[Allocation]:
        return [data for address, data in _allocations().items() if address not in self._own]


@contextmanager
def pretend(allocations: Iterable[Allocation], *, is_asleep: bool) -> Iterator[None]:
    """Let the allocator believe that all of these are asleep (or awake) already, so that it passes them over."""
    changed = [allocation for allocation in allocations if allocation.is_asleep != is_asleep]
    for allocation in changed:
        allocation.is_asleep = is_asleep
    try:
        yield
    finally:
        for allocation in changed:
            allocation.is_asleep = not is_asleep


def _allocations() -> dict[int, Allocation]:
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance().pointer_to_data
