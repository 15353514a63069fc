"""The number of NCCL communicators that a run makes on a node and on a GPU.

A communicator is a group of two or more ranks that exchange tensors on GPUs. NCCL makes a communicator when a group is
first used, so that the count is an upper bound: a trainer with pipeline and data axes, for example, never uses its
"model" group. These take no communicator: groups of one rank, groups for objects (Gloo), vLLM's groups but the tensor
group, and a weight sync, which uses the trainer's group of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.models.parallel.partitions import engine_partition, trainer_partitions

Communicators = list[tuple[int, ...]]  # the ranks of each


def role_communicators(
    world_size: int, *, tensor: int, pipeline: int, rollout_tensor: int, has_trainer: bool = True
) -> dict[str, Communicators]:
    """Return the communicators of a role's trainer and engine."""
    partitions = set(trainer_partitions(world_size, tensor, pipeline).values()) if has_trainer else set()
    return {
        "trainer": _of_several_ranks(group for partition in partitions for group in partition),
        "engine": _of_several_ranks(engine_partition(world_size, rollout_tensor)),
    }


def _of_several_ranks(groups: Iterable[tuple[int, ...]]) -> Communicators:
    return sorted(group for group in groups if len(group) > 1)


def count_communicators(config: Config, *, takes_checkpoints: bool = False) -> dict[str, Any]:
    """Return `per_node` and `per_gpu`, of the node and the GPU that have most, and `roles`: the node's, by part.

    `takes_checkpoints`: roles that are not trained have a trainer too, as in `plan.memory.plan_memory`.
    """
    made = {
        name: role_communicators(
            config.world_size,
            tensor=role.parallel.tensor,
            pipeline=role.parallel.pipeline,
            rollout_tensor=role.rollout.tensor,
            has_trainer=role.trainable or takes_checkpoints,
        )
        for name, role in config.models.items()
    }
    size = config.launch.tasks_per_node
    nodes = [range(first, first + size) for first in range(0, config.world_size, size)]
    fullest = max(nodes, key=lambda node: sum(_count(parts, node) for parts in made.values()))
    return {
        "per_node": sum(_count(parts, fullest) for parts in made.values()),
        "per_gpu": max(
            sum(_count(parts, range(rank, rank + 1)) for parts in made.values()) for rank in range(config.world_size)
        ),
        "roles": {
            name: {part: _count({part: found}, fullest) for part, found in parts.items()}
            for name, parts in made.items()
        },
    }


def _count(parts: Mapping[str, Communicators], ranks: range) -> int:
    """Return the number of communicators with a member among `ranks`."""
    return sum(not set(ranks).isdisjoint(members) for found in parts.values() for members in found)
