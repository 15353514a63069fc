"""Work on a list that every process holds, done once: each takes a share, all get all results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tango_hpc.parallel.exchange import Exchange

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_shares(
    exchange: Exchange, function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result]:
    """`function(items)`, each process calling it on every so manieth item. Collective, same items in all processes.

    For grading: every answer is graded once only, so that processes cannot disagree on one that hits a limit.
    """
    size, number = exchange.size, exchange.number
    if size == 1:
        return function(items)
    shares = exchange.all_gather(function(items[number::size]))
    return [shares[index % size][index // size] for index in range(len(items))]
