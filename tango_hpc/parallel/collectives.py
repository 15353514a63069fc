"""Collectives on objects and numbers. All ranks of the group must call them in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def all_gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank. For small picklable things."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, source: int = 0, group: ProcessGroup | None = None) -> Any:
    """The value of global rank `source` on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]


def any_rank(flag: bool, group: ProcessGroup | None = None) -> bool:
    """Whether the flag is set on any rank, so that all take the same branch."""
    return bool(_reduce([float(flag)], dist.ReduceOp.MAX, group)[0])


def sum_over_ranks(values: Sequence[float], group: ProcessGroup | None = None) -> list[float]:
    """Element-wise sums in float64."""
    return _reduce(values, dist.ReduceOp.SUM, group)


def max_over_ranks(values: Sequence[float], group: ProcessGroup | None = None) -> list[float]:
    """Element-wise maxima in float64."""
    return _reduce(values, dist.ReduceOp.MAX, group)


def _reduce(values: Sequence[float], operation: dist.ReduceOp, group: ProcessGroup | None) -> list[float]:
    """On CPU tensors, over Gloo on every machine: no GPU synchronisation for a few numbers."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op=operation, group=group)
    return tensor.tolist()
