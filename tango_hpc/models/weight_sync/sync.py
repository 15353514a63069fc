"""Weight sync of one role: from the trainer's shards straight to the engine's shards.

Checks on construction that both sides have exactly the parameters that their layouts say, so that a plan made from
shapes alone moves the right bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from tango_hpc.base.config.schema import ReshardConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.models.engine.engine import RolloutEngine
from tango_hpc.models.engine.weights import EngineWeights
from tango_hpc.models.layout.engine_layout import engine_layout
from tango_hpc.models.layout.trainer_layout import LocalParam, megatron_layout
from tango_hpc.models.parallel.collectives import all_gather_objects
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.weight_sync.plan import Layouts, build_plan
from tango_hpc.models.weight_sync.transfer import Transfer
from tango_hpc.models.weight_sync.verify import find_mismatches


class TrainerShards(Protocol):
    """The part of `tango_hpc.models.trainer.Policy` that a sync needs."""

    shape: ModelShape
    groups: PolicyGroups

    def named_shards(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class SyncStats:
    """Syncs, over all ranks; bytes in the engine's precision."""

    bytes_sent: int = 0
    bytes_local: int = 0
    bytes_minimum: int = 0

    def __add__(self, other: SyncStats) -> SyncStats:
        """Return both together."""
        return SyncStats(
            self.bytes_sent + other.bytes_sent,
            self.bytes_local + other.bytes_local,
            self.bytes_minimum + other.bytes_minimum,
        )


class WeightSync:
    """Brings a policy's weights into its engine. Every call is collective over all ranks.

    The engine must be awake. Construction raises `CheckFailed` on all ranks when a parameter is missing or has
    another shape on any of them; a sync raises `WeightSyncError` when a peer is dead or silent for longer than
    `reshard.timeout_seconds`, and `CheckFailed` when checksums differ.
    """

    def __init__(self, policy: TrainerShards, engine: RolloutEngine, config: ReshardConfig) -> None:
        self.policy, self.engine, self.config = policy, engine, config
        self.weights = EngineWeights(engine.model)
        rank, groups, shape = dist.get_rank(), policy.groups, policy.shape
        self.layouts = Layouts(
            shape=shape,
            world_size=dist.get_world_size(),
            tensor=groups.tensor_size,
            pipeline=groups.pipeline_size,
            rollout_tensor=engine.tensor_size,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        )
        self.layouts.check()
        source = megatron_layout(
            shape, groups.tensor_size, groups.pipeline_size, groups.tensor_rank, groups.pipeline_rank
        )
        target = engine_layout(shape, engine.tensor_size, engine.tensor_rank)
        self._check(source, target)
        plan = build_plan(
            self.layouts,
            element_bytes=engine.dtype.itemsize,
            bucket_bytes=int(config.bucket_mb * 2**20),
            rank=rank,
        )
        assert plan.mine is not None
        # NCCL connects all ranks in the first operation of a group, and not all are in the first round of a sync.
        dist.all_reduce(torch.zeros(1, device=engine.device), group=groups.world)
        self.totals = plan.totals
        self.transfer = Transfer(
            plan.mine,
            source,
            target,
            dtype=engine.dtype,
            device=engine.device,
            group=groups.world,
            timeout_seconds=config.timeout_seconds,
        )
        self.source, self.target = source, target
        self.num_syncs = 0

    def sync(self) -> SyncStats:
        """Install the policy's present weights, drop the engine's cached prefixes, verify as configured."""
        sent = self.transfer.run(self.policy.named_shards(), self.weights)
        assert sent == self.totals[dist.get_rank()].sent_bytes, "more or less was sent than planned"
        if not self.num_syncs or self.engine.forgets_when_asleep:
            self._zero_padding()
        self.engine.reset_prefix_cache()
        self.num_syncs += 1
        if self.config.verify == "always" or (self.config.verify == "first" and self.num_syncs == 1):
            mismatches = self.find_mismatches()
            if mismatches:
                raise CheckFailed("weight sync, phase verify: engine and trainer differ:\n" + "\n".join(mismatches))
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return SyncStats(
            bytes_sent=sum(total.sent_bytes for total in self.totals),
            bytes_local=sum(total.local_bytes for total in self.totals),
            bytes_minimum=sum(total.minimum_bytes for total in self.totals),
        )

    def find_mismatches(self) -> list[str]:
        """Return the ranks and tensors whose engine weights are not the trainer's; the same list on all ranks."""
        return find_mismatches(
            self.layouts,
            self.source,
            self.policy.named_shards(),
            self.target,
            self.weights,
            dtype=self.engine.dtype,
            group=self.transfer.group,
        )

    def _check(self, source: Mapping[str, LocalParam], target: Mapping[str, LocalParam]) -> None:
        """Check that both sides have the parameters of their layouts; all ranks agree on the outcome."""
        shards = {name: tuple(tensor.shape) for name, tensor in self.policy.named_shards().items()}
        problems = _differences("trainer", source, shards) + _differences("engine", target, self.weights.shapes())
        reports = [
            f"rank {rank}: {problem}" for rank, found in enumerate(all_gather_objects(problems)) for problem in found
        ]
        if reports:
            raise CheckFailed(
                "weight sync, phase plan: parameters do not fit the model's shape:\n" + "\n".join(reports)
            )

    def _zero_padding(self) -> None:
        """Make the rows of the padded vocabulary zero, as the engine's loader does; no sync writes to them."""
        for name, param in self.target.items():
            rows = max((piece.local[0][1] for piece in param.pieces), default=0)
            if rows < param.shape[0]:
                self.weights.tensor(name)[rows:].zero_()
                self.weights.close(name.rpartition(".")[0])


def _differences(side: str, layout: Mapping[str, LocalParam], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = [f"{side} has no tensor {name}" for name in layout if name not in found]
    problems += [f"{side} has an unexpected tensor {name}" for name in found if name not in layout]
    for name, param in layout.items():
        if name in found and found[name] != param.shape:
            problems.append(f"{side} tensor {name} has shape {found[name]} instead of {param.shape}")
    return problems
