"""Proof of a sync: per-tensor checksums of the trainer's shards against those of every engine shard.

The trainer's side hashes its parameters where it holds them, the engine's side what the engine computes with: its
live parameters, or on a CPU the packed weights, read back through their kernels. Both use positions in the Hugging
Face tensor, the one through the trainer's layout and the other through the engine's, and neither looks at what was
sent. The trainer's replicas share the work, so replicas that have drifted apart are found as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tango_hpc.base.model_shape import hf_tensors
from tango_hpc.models.layout.trainer_layout import LocalParam
from tango_hpc.models.parallel.collectives import all_gather_objects
from tango_hpc.models.weight_sync.checksum import box_checksum
from tango_hpc.models.weight_sync.plan import Layouts, match_layouts
from tango_hpc.models.weight_sync.transfer import Locator


class Readable(Protocol):
    """Weights that can be read back (`tango_hpc.models.engine.weights.EngineWeights`)."""

    def copies(self, name: str) -> Iterator[torch.Tensor]: ...


def find_mismatches(
    layouts: Layouts,
    source: Mapping[str, LocalParam],
    shards: Mapping[str, torch.Tensor],
    target: Mapping[str, LocalParam],
    weights: Readable,
    *,
    dtype: torch.dtype,
    group: ProcessGroup,
) -> list[str]:
    """Return one line for each rank and tensor that differ, in rank order, the same on all ranks. Collective.

    The trainer's values are rounded to the engine's `dtype` first, as they are when they are sent.
    """
    rank = dist.get_rank()
    rows = {name: row for row, name in enumerate(hf_tensors(layouts.shape))}
    device = next(iter(shards.values())).device
    expected = torch.zeros(len(rows), layouts.rollout_tensor, dtype=torch.int64, device=device)
    locator, place = Locator(source), layouts.place(rank)
    matches = match_layouts(layouts)
    for number, unit in enumerate(matches.units):
        for shard, held in enumerate(unit):
            for index, segments in held.items():
                holder = matches.classes[index][0]
                if holder == place and layouts.replicas(*holder)[number % layouts.data] == rank:
                    for tensor, box in segments:
                        name, slices = locator.find((tensor, box))
                        expected[rows[tensor], shard] += box_checksum(shards[name][slices].to(dtype), box)
    dist.all_reduce(expected, group=group)
    mine = expected[:, rank % layouts.rollout_tensor].tolist()
    # Where the engine holds a parameter more than once, each copy has its own sums.
    installed: dict[tuple[str, int], int] = defaultdict(int)
    for name, param in target.items():
        for copy, values in enumerate(weights.copies(name)):
            for piece in param.pieces:
                part = values[tuple(slice(start, stop) for start, stop in piece.local)].to(dtype)
                installed[piece.tensor, copy] += int(box_checksum(part, piece.box))
    wrong = {tensor for (tensor, _), total in installed.items() if (total - mine[rows[tensor]]) % 2**64}
    wrong |= {tensor for tensor, row in rows.items() if mine[row] and (tensor, 0) not in installed}
    differing = [tensor for tensor in rows if tensor in wrong]
    return [f"rank {number}: {name}" for number, names in enumerate(all_gather_objects(differing)) for name in names]
