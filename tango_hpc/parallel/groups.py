"""The process groups of one role's trainer.

Each role has its own set, handed to Megatron-core as a `ProcessGroupCollection`; its global `parallel_state` is
never initialised. Ranks are numbered with the tensor axis fastest, then data, then pipeline, which is Megatron's own
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from tango_hpc.errors import UserError

# Which ranks form each of a cut's groups; every rank is in exactly one of them.
Partition = frozenset[tuple[int, ...]]

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
        ends = {0, pipeline_size - 1}

        def along(axes: Callable[[int, int, int], object]) -> ProcessGroup:
            """This rank's group where those of equal `axes(tensor, data, pipeline)` belong together."""
            groups: dict[object, list[int]] = {}
            for other in range(world_size):
                groups.setdefault(axes(*rank_position(other, tensor_size, data_size)), []).append(other)
            return _group(frozenset(map(tuple, groups.values())))

        tensor = along(lambda t, d, p: (d, p))
        data = along(lambda t, d, p: (t, p))
        pipeline = along(lambda t, d, p: (t, d))
        model = along(lambda t, d, p: d)
        world = along(lambda t, d, p: ())
        alone = along(lambda t, d, p: (t, d, p))
        # The stages between the ends make a group of theirs, for which they have no use: see `_group`.
        ends_or_between = along(lambda t, d, p: (t, d, p in ends))
        embedding = ends_or_between if p in ends else None
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


def rank_position(rank: int, tensor_size: int, data_size: int) -> tuple[int, int, int]:
    """(tensor, data, pipeline) coordinates of a global rank."""
    return rank % tensor_size, rank // tensor_size % data_size, rank // (tensor_size * data_size)


def limit_collectives(timeout: timedelta) -> None:
    """How long groups made from now on wait for a peer; without it PyTorch's 30 minutes, whatever the world's limit."""
    global _timeout
    _timeout = timeout


def forget_groups() -> None:
    """Drop the groups made so far; they end with the default group."""
    _groups.clear()


def _group(partition: Partition) -> ProcessGroup:
    """This rank's group of a partition of all ranks, made once: equal ones share their communicators and buffers.

    Only members take part, so that 1,024 ranks do not wait on each other for groups that most are not in. PyTorch then
    names a group after its ranks and after how many groups this process has made. Members that had made different
    numbers would wait for each other under different names for ever; so all ranks make one group for each partition.
    """
    if partition not in _groups:
        (ranks,) = (part for part in partition if dist.get_rank() in part)
        _groups[partition] = dist.new_group(list(ranks), timeout=_timeout, use_local_synchronization=True)
    return _groups[partition]
