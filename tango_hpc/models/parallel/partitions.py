"""The ranks of a role's process groups: the trainer makes these groups, the plan counts them. Pure Python.

Ranks are numbered with the tensor axis fastest, then data, then pipeline, which is Megatron-core's own order.
"""

from __future__ import annotations

from collections.abc import Callable

# The groups of one cut of all ranks; every rank is in exactly one of them.
Partition = frozenset[tuple[int, ...]]


def rank_position(rank: int, tensor_size: int, data_size: int) -> tuple[int, int, int]:
    """Return the (tensor, data, pipeline) coordinates of a global rank."""
    return rank % tensor_size, rank // tensor_size % data_size, rank // (tensor_size * data_size)


def trainer_partitions(world_size: int, tensor_size: int, pipeline_size: int) -> dict[str, Partition]:
    """Return the partition of each kind of group of a trainer; equal partitions share their groups.

    "embedding" joins the first and the last pipeline stage. The stages between the ends form a group without a use, so
    that every rank makes the same number of groups.
    """
    data_size = world_size // (tensor_size * pipeline_size)
    ends = {0, pipeline_size - 1}
    same: dict[str, Callable[[int, int, int], object]] = {  # ranks with the same value are in one group
        "tensor": lambda t, d, p: (d, p),
        "data": lambda t, d, p: (t, p),
        "pipeline": lambda t, d, p: (t, d),
        "model": lambda t, d, p: d,
        "world": lambda t, d, p: (),
        "alone": lambda t, d, p: (t, d, p),
        "embedding": lambda t, d, p: (t, d, p in ends),
    }
    partitions = {}
    for name, value in same.items():
        groups: dict[object, list[int]] = {}
        for rank in range(world_size):
            groups.setdefault(value(*rank_position(rank, tensor_size, data_size)), []).append(rank)
        partitions[name] = frozenset(map(tuple, groups.values()))
    return partitions


def engine_partition(world_size: int, tensor_size: int) -> Partition:
    """Return the tensor groups of an engine, the only groups in which vLLM makes a communicator."""
    return frozenset(tuple(range(first, first + tensor_size)) for first in range(0, world_size, tensor_size))
