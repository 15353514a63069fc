"""The process groups of one role's trainer.

Each role has its own set, handed to Megatron-core as a `ProcessGroupCollection`; its global `parallel_state` is
never initialised, so two roles in one process can be cut differently. Ranks are numbered with the tensor axis
fastest, then data, then pipeline, which is Megatron's own order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from tango_hpc.errors import UserError

_groups: dict[tuple[int, ...], ProcessGroup] = {}


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

        def at(tensor: int, data: int, pipeline: int) -> int:
            return tensor + tensor_size * (data + data_size * pipeline)

        tensor = _group([at(i, d, p) for i in range(tensor_size)])
        data = _group([at(t, i, p) for i in range(data_size)])
        pipeline = _group([at(t, d, i) for i in range(pipeline_size)])
        model = _group([at(i, d, j) for j in range(pipeline_size) for i in range(tensor_size)])
        world = _group(list(range(world_size)))
        alone = _group([rank])
        ends = sorted({0, pipeline_size - 1})
        embedding = _group([at(t, d, i) for i in ends]) if p in ends else None
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


def forget_groups() -> None:
    """Drop the groups made so far; they end with the default group."""
    _groups.clear()


def _group(ranks: list[int]) -> ProcessGroup:
    """The group of these ranks, of which this is one; made once, so that both roles share equal groups.

    Only members take part, and all make their groups in one order, so that 1,024 ranks do not wait on each other
    for groups that most are not in.
    """
    key = tuple(ranks)
    if key not in _groups:
        _groups[key] = dist.new_group(ranks, use_local_synchronization=True)
    return _groups[key]
