"""Work on a list that every process holds, done once: each takes a share, all get all results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from tango_hpc.method.batches import Advantages, Solutions, Verifications
from tango_hpc.method.hooks import AdvantagesHook
from tango_hpc.models.parallel.exchange import Exchange, PeerFailedError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_shares(
    exchange: Exchange, function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]
) -> list[Result]:
    """Return `function(items)`; each process computes its share. Collective, same items in all processes.

    For grading: every answer is graded once only, so that processes cannot disagree on one that hits a limit.
    """
    return from_shares(in_each(exchange, lambda: function(my_share(exchange, items))))


def in_each(exchange: Exchange, work: Callable[[], Result]) -> list[Result]:
    """Return the results of `work` in each process. Collective; an error is raised where it occurs, `PeerFailedError`
    elsewhere.
    """
    if exchange.size == 1:
        return [work()]
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    found = exchange.all_gather((told, result))
    if failure is not None:
        raise failure
    for text, _ in found:
        if text is not None:
            raise PeerFailedError(f"another process failed: {text}")
    return [value for _, value in found]


def my_share(exchange: Exchange, items: Sequence[Item]) -> Sequence[Item]:
    """Return this process's share of the items, one in as many as there are processes."""
    return items[exchange.number :: exchange.size]


def from_shares(shares: Sequence[Sequence[Result]]) -> list[Result]:
    """Return the results of all processes, in the order of the items."""
    return [shares[index % len(shares)][index // len(shares)] for index in range(sum(map(len, shares)))]


@dataclass(frozen=True)
class OnceForAll(AdvantagesHook):
    """A file of advantages that the first process calls for all. Collective."""

    exchange: Exchange

    @classmethod
    def of(cls, hook: AdvantagesHook, exchange: Exchange) -> Self:
        """Return `hook`, shared by the processes of `exchange`."""
        return cls(**vars(hook), exchange=exchange)

    def __call__(self, batch: Solutions | Verifications, state: Any) -> Advantages:
        """Return the same in every process."""
        call = super().__call__
        return in_each(self.exchange, lambda: call(batch, state) if self.exchange.is_first else ([], None))[0]
