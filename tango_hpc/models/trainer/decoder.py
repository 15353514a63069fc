"""A decoder layer with what families differ in: norms after its blocks, factors, norms over all heads.

T: tokens of a micro-batch on this rank. H: heads on this rank. D: dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from tango_hpc.base.families import FAMILIES, Family, Scales
from tango_hpc.base.families.family import NORMS
from tango_hpc.models.trainer.recompute import TokenNorm
from tango_hpc.models.trainer.rotary import LayerPositions


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron-core's configuration and the facts of the family."""

    family: Family = FAMILIES["llama"]
    scales: Scales = field(default_factory=Scales)
    positions: list[LayerPositions] = field(default_factory=list)


class DecoderLayer(TransformerLayer):
    """Megatron-core's layer, whose blocks may have a norm behind them and a factor before they are added."""

    def __init__(self, config: DecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        factor = config.scales.residual
        for block, norm in (("self_attn_bda", "post_attention_norm"), ("mlp_bda", "post_mlp_norm")):
            if norm in NORMS[config.family.norms]:
                setattr(self, norm, TokenNorm(config, config.hidden_size, config.layernorm_epsilon))
            if hasattr(self, norm) or factor != 1.0:
                setattr(self, block, _added(getattr(self, norm, None), factor))


def _added(norm: nn.Module | None, factor: float) -> Callable[..., Callable[..., Tensor]]:
    """Return what adds a block's output to the residual, in the form in which Megatron-core asks for it."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float) -> Tensor:
        assert output[1] is None, "no supported block has a bias at its end"
        added = output[0] if norm is None else norm(output[0])
        return residual + (added if factor == 1.0 else factor * added)

    return lambda _training, _fused: add


class AllHeadsNorm(nn.Module):
    """An RMS norm over the queries or keys of all heads, which tensor ranks have parts of: [T, 1, H, D].

    The weight is whole on every rank, and its gradient summed over them, as Megatron-core sums those of norms of
    queries and keys. Where ranks share a head, its squares come once from each of them.
    """

    def __init__(
        self, config: DecoderConfig, hidden_size: int, eps: float, num_heads: int, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads * hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps, self.group = eps, group
        size, rank = group.size(), group.rank()
        self.sharing = max(size // num_heads, 1)
        count = max(num_heads // size, 1)
        first = rank // self.sharing * count
        self.mine = slice(first * hidden_size, (first + count) * hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's heads."""
        values = x.float()
        squares = values.square().sum((-2, -1), keepdim=True)
        # Each rank uses the sum over all ranks, so that its gradient is summed over them too.
        summed = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        squares = copy_to_tensor_model_parallel_region(summed, group=self.group) / self.sharing
        scale = torch.rsqrt(squares / self.weight.numel() + self.eps)
        return (values * scale * self.weight[self.mine].view(x.shape[-2:])).to(x.dtype)
