"""The cheap parts of a layer, whose outputs need not be kept: its norms, and the gate of the feed-forward part.

With `recompute: selective` they are dropped once the matrix products behind them have read them, and computed again
just before these need them in the backward pass: no product is computed twice. Megatron-core's own modules to choose
from do less here: its `layernorm` needs Transformer Engine, its `core_attn` drops what our attention never keeps, and
its `mlp` computes the largest products of a layer again.
T: tokens of a micro-batch on this rank. F: this rank's share of the feed-forward part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class _Cheap(nn.Module):
    """A part that can forget its output after another one has read it."""

    _forgets = False
    _unread: CheckpointWithoutOutput | None = None

    def compute(self, x: Tensor) -> Tensor:
        """Compute the part."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, which is to be forgotten where that was asked for and there will be a backward pass."""
        if not (self._forgets and torch.is_grad_enabled()):
            return self.compute(x)
        self._unread = CheckpointWithoutOutput(fp8=None)  # its default, False, stands for fp8
        return self._unread.checkpoint(self.compute, x)

    def forget_after(self, reader: nn.Module) -> None:
        """Drop each output when `reader` has returned, until the gradient of what that returned is known."""
        self._forgets = True
        reader.register_forward_hook(self._forget)

    def _forget(self, _reader: nn.Module, _inputs: Any, outputs: tuple[Tensor, Tensor | None]) -> None:
        if self._unread is not None:
            self._unread.discard_output_and_register_recompute(outputs[0])
            self._unread = None


class TokenNorm(_Cheap, nn.RMSNorm):
    """PyTorch's norm, also of a share of the tokens: the gradients of its weight are then added up over tensor
    ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
        self.adds_one = config.layernorm_zero_centered_gamma

    def compute(self, x: Tensor) -> Tensor:
        """Return the norm."""
        if self.adds_one:
            return F.rms_norm(x, self.normalized_shape, 1.0 + self.weight, self.eps)
        return nn.RMSNorm.forward(self, x)


class GatedUnit(_Cheap):
    """activation(gate) * up, [T, 1, 2F] to [T, 1, F]. In place of Megatron-core's, which also keeps a copy of `up`."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.activation = config.family.activation

    def compute(self, x: Tensor) -> Tensor:
        """Return the product."""
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def sharded_state_dict(self, *_: Any) -> dict[str, Any]:
        """Return nothing to save; Megatron-core asks every part of a feed-forward block."""
        return {}


def forget_cheap_outputs(model: nn.Module) -> None:
    """Let the layers of a GPTModel keep matrix products, attention and residuals, and nothing that follows from
    them.
    """
    for layer in model.decoder.layers:
        if isinstance(layer.input_layernorm, TokenNorm):
            layer.input_layernorm.forget_after(layer.self_attention)
        if isinstance(layer.pre_mlp_layernorm, TokenNorm):
            layer.pre_mlp_layernorm.forget_after(layer.mlp)
        layer.mlp.activation_func.forget_after(layer.mlp.linear_fc2)
