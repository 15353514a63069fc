"""The process groups of one role's trainer.

Each role has its own set, handed to Megatron-core as a `ProcessGroupCollection`; its global `parallel_state` is
never initialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from tango_hpc.base.errors import UserError
from tango_hpc.models.parallel.partitions import Partition, rank_position, trainer_partitions

_groups: dict[Partition, ProcessGroup] = {}
_timeout: timedelta | None = None


@dataclass(frozen=True)
class PolicyGroups:
    """This rank's place on the three axes of one role, and the groups along them.

    `embedding` joins the first and the last pipeline stage, and is None on the stages between them.
    """

    tensor_size: int
    data_size: int
    pipeline_size: int
    tensor_rank: int
    data_rank: int
    pipeline_rank: int
    tensor: ProcessGroup
    data: ProcessGroup
    pipeline: ProcessGroup
    model: ProcessGroup
    embedding: ProcessGroup | None
    world: ProcessGroup
    collection: ProcessGroupCollection

    @classmethod
    def create(cls, tensor_size: int, pipeline_size: int) -> PolicyGroups:
        """Cut the world into tensor x data x pipeline. Every rank must call this, in the same order."""
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if world_size % (tensor_size * pipeline_size):
            raise UserError(
                f"{world_size} ranks cannot be cut into tensor {tensor_size} x pipeline {pipeline_size}; "
                "use sizes whose product divides the number of ranks"
            )
        data_size = world_size // (tensor_size * pipeline_size)
        t, d, p = rank_position(rank, tensor_size, data_size)
        made = {name: _group(cut) for name, cut in trainer_partitions(world_size, tensor_size, pipeline_size).items()}
        tensor, data, pipeline, model, world = (made[name] for name in ("tensor", "data", "pipeline", "model", "world"))
        alone, embedding = made["alone"], made["embedding"] if p in (0, pipeline_size - 1) else None
        collection = ProcessGroupCollection(
            tp=tensor, pp=pipeline, mp=model, embd=embedding, pos_embd=None, cp=alone, tp_cp=tensor, ep=alone,
            expt_tp=tensor, tp_ep=tensor, tp_ep_pp=model, dp=data, dp_cp=data, expt_dp=data, intra_dp_cp=data,
            intra_expt_dp=data, intra_dist_opt=world,
        )  # fmt: skip
        return cls(
            tensor_size, data_size, pipeline_size, t, d, p, tensor, data, pipeline, model, embedding, world, collection
        )

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the output layer and computes the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pipeline, self.pipeline_size - 1)


def limit_collectives(timeout: timedelta) -> None:
    """Set how long groups made from now on wait for a peer; without it PyTorch's 30 minutes, whatever the world's
    limit.
    """
    global _timeout
    _timeout = timeout


def forget_groups() -> None:
    """Drop the groups made so far; they end with the default group."""
    _groups.clear()


def _group(partition: Partition) -> ProcessGroup:
    """Return this rank's group of a partition of all ranks, made once: equal ones share their communicators and
    buffers.

    All ranks together are the default group. Else only members take part, so that 1,024 ranks do not wait on each other
    for groups that most are not in. PyTorch then names a group after its ranks and after how many groups this process
    has made. Members that had made different numbers would wait for each other under different names for ever; so all
    ranks make one group for each partition.
    """
    if len(partition) == 1:
        world: ProcessGroup = dist.group.WORLD
        return world
    if partition not in _groups:
        (ranks,) = (part for part in partition if dist.get_rank() in part)
        _groups[partition] = dist.new_group(list(ranks), timeout=_timeout, use_local_synchronization=True)
    return _groups[partition]
