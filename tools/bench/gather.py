"""What other systems do, to measure against: gather every full tensor on every rank, hand it to the engine's loader.

As fast as it gets without a plan: one all-gather over the tensor ranks and one broadcast over the pipeline stages per
layer, not per tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from tango_hpc.base.model_shape import ModelShape, hf_tensors
from tango_hpc.models.layout.trainer_layout import Piece, megatron_layout
from tango_hpc.models.parallel.groups import PolicyGroups

# Of one trainer shard and one layer: (parameter, piece), in an order that all ranks know.
Pieces = list[tuple[str, Piece]]


class FullGather:
    """Yields every full Hugging Face tensor on every rank."""

    def __init__(self, shape: ModelShape, groups: PolicyGroups, dtype: torch.dtype, device: torch.device) -> None:
        self.groups, self.dtype, self.device = groups, dtype, device
        self.sizes = hf_tensors(shape)
        # Layer (or lone tensor) -> the stage that sends it -> for each tensor rank, its pieces.
        self.units: dict[str, tuple[int, list[Pieces]]] = {}
        taken: set[str] = set()
        for stage in range(groups.pipeline_size):
            units: dict[str, list[Pieces]] = defaultdict(lambda: [[] for _ in range(groups.tensor_size)])
            for tensor_rank in range(groups.tensor_size):
                layout = megatron_layout(shape, groups.tensor_size, groups.pipeline_size, tensor_rank, stage)
                for name, param in layout.items():
                    for piece in param.pieces:
                        if piece.tensor not in taken:
                            units[_unit(piece.tensor)][tensor_rank].append((name, piece))
            taken |= {piece.tensor for unit in units.values() for _, piece in unit[0]}
            self.units |= {unit: (stage, pieces) for unit, pieces in units.items()}

    @torch.no_grad()
    def tensors(self, shards: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor), a layer at a time."""
        groups = self.groups
        for stage, pieces in self.units.values():
            sizes = [sum(piece.num_elements for _, piece in held) for held in pieces]
            longest = max(sizes)
            gathered = torch.empty(groups.tensor_size, longest, dtype=self.dtype, device=self.device)
            if groups.pipeline_rank == stage:
                own = torch.zeros(longest, dtype=self.dtype, device=self.device)
                at = 0
                for name, piece in pieces[groups.tensor_rank]:
                    values = shards[name][tuple(slice(*span) for span in piece.local)]
                    own[at : at + piece.num_elements].view(piece.size).copy_(values)
                    at += piece.num_elements
                dist.all_gather_into_tensor(gathered.view(-1), own, group=groups.tensor)
            if groups.pipeline_size > 1:
                dist.broadcast(gathered, dist.get_global_rank(groups.pipeline, stage), group=groups.pipeline)
            full: dict[str, torch.Tensor] = {}
            for values, held in zip(gathered, pieces, strict=True):
                at = 0
                for _, piece in held:
                    if piece.tensor not in full:
                        full[piece.tensor] = torch.empty(self.sizes[piece.tensor], dtype=self.dtype, device=self.device)
                    part = values[at : at + piece.num_elements].view(piece.size)
                    full[piece.tensor][tuple(slice(*span) for span in piece.box)] = part
                    at += piece.num_elements
            yield from full.items()


def _unit(tensor: str) -> str:
    return ".".join(tensor.split(".")[:3]) if tensor.startswith("model.layers.") else tensor
