"""Work on a list that every rank holds, done once: each rank takes a share, all get all results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from tango_hpc.parallel.collectives import all_gather_objects

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_all_ranks(function: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item]) -> list[Result]:
    """`function(items)`, each rank calling it on every world-size-th item. Collective, same items on all ranks.

    For grading: every answer is graded by one rank only, so that ranks cannot disagree on one that hits a limit.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return function(items)
    shares = all_gather_objects(function(items[rank::world_size]))
    return [shares[index % world_size][index // world_size] for index in range(len(items))]
