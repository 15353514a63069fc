"""Collectives on objects and numbers. All ranks of the group must call them in the same order.

Numbers travel as CPU tensors, over Gloo on every machine: no GPU synchronisation for a few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def all_gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank. For small picklable things."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def any_rank(flag: bool, group: ProcessGroup | None = None) -> bool:
    """Return whether the flag is set on any rank, so that all take the same branch."""
    tensor = torch.tensor(float(flag))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return bool(tensor)


def max_over_ranks(values: Sequence[float], group: ProcessGroup | None = None) -> list[float]:
    """Return element-wise maxima over all ranks, in float64."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
