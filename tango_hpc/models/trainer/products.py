"""Matrix products of float32 layers in bfloat16, on CPUs that multiply it faster.

Weights, gradients, residuals, norms, attention and the output layer stay in float32; the products of the layers round
their operands and their result to 8 bits of mantissa, with sums in float32 in between. T: tokens, K: inputs, N:
outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from tango_hpc.base.config.values import ProductDtype


def rounds_products(products: ProductDtype) -> bool:
    """Return whether `products` means bfloat16 here; "auto" does on CPUs that multiply it faster than float32.

    Those are CPUs with AMX, and AMD's with AVX512-BF16: Intel's that have AVX512-BF16 without AMX, as some virtual
    machines do, multiply bfloat16 at about half the speed of float32.
    """
    if products == "auto":
        return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and _made_by_amd())
    return products == "bfloat16"


def _made_by_amd() -> bool:
    return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


def multiply_in_bfloat16(model: nn.Module) -> None:
    """Let the linear layers of a Megatron-core model in float32 multiply in bfloat16, forward and backward."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = _linear  # which Megatron-core calls, between its own collectives


def _linear(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> Tensor:
    """Compute the product as Megatron-core's linear layer does: [T, 1, K] to [T, 1, N]."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    output = _Product.apply(input.flatten(0, -2), weight).unflatten(0, input.shape[:-1])
    return output if bias is None else output + bias


class _Product(torch.autograd.Function):
    """x_TK @ weight_NK.t() with operands in bfloat16; keeps those, half of what float32 would take."""

    @staticmethod
    def forward(ctx, x_TK, weight_NK):
        x_TK, weight_NK = x_TK.bfloat16(), weight_NK.bfloat16()
        ctx.save_for_backward(x_TK, weight_NK)
        return (x_TK @ weight_NK.t()).float()

    @staticmethod
    def backward(ctx, grad_TN):
        x_TK, weight_NK = ctx.saved_tensors
        grad_TN = grad_TN.bfloat16()
        return (grad_TN @ weight_NK).float(), (grad_TN.t() @ x_TK).float()
