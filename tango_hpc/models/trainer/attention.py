"""Causal self-attention over sequences packed one after the other, with no padding in the rest of the model.

T: tokens of all sequences of a micro-batch. H: query heads, G: key/value heads, D: dimensions of a head.
B: sequences of a block, L: its longest. P: pairs of dimensions that are rotated.

Rotary embedding happens here, from one table of cosines per micro-batch, in place of Megatron-core's loop over the
sequences in every layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from tango_hpc.models.parallel.ranks import to_device
from tango_hpc.models.trainer.decoder import DecoderConfig
from tango_hpc.models.trainer.rotary import Rotary

# A block of padded sequences keeps those at least this share of its longest.
_LEAST_FILL = 0.8
_SMALL_BLOCK = 8


@dataclass
class PackedSequences(PackedSeqParams):
    """The facts that attention needs of a micro-batch: the bounds of its sequences, and rotary angles per token.

    `angles` holds for each rotary of the model the cosines and sines of the rotated dimensions, [T, 2 P] each. `blocks`
    is filled where sequences are padded for the attention alone: one [B, L] index of tokens each, in which
    padding repeats a sequence's last token; `unpad` then finds the T tokens in the flattened blocks.
    """

    angles: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    blocks: list[Tensor] = field(default_factory=list)
    unpad_T: Tensor | None = None

    @classmethod
    def of_lengths(
        cls, lengths: Sequence[int], rotaries: Sequence[Rotary], dtype: torch.dtype, device: torch.device
    ) -> PackedSequences:
        """Describe sequences of these lengths, longest first, that lie one after the other."""
        lengths_S = np.asarray(lengths, dtype=np.int64)
        starts_S = np.concatenate([[0], np.cumsum(lengths_S)])
        positions_T = np.arange(starts_S[-1]) - np.repeat(starts_S[:-1], lengths_S)
        angles = []
        for rotary in rotaries:
            angles_TD = torch.outer(torch.from_numpy(positions_T).float(), rotary.frequencies_P).repeat(1, 2)
            cos, sin = (rotary.scale * values for values in (angles_TD.cos(), angles_TD.sin()))
            angles.append((to_device(cos.to(dtype), device), to_device(sin.to(dtype), device)))
        bounds = to_device(torch.from_numpy(starts_S).int(), device)
        longest = int(lengths_S.max())
        packed = cls(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest,
            angles=angles,
        )  # fmt: skip
        if not _has_varlen(device, dtype):
            packed._pad(lengths_S, starts_S, device)
        return packed

    def _pad(self, lengths_S: np.ndarray, starts_S: np.ndarray, device: torch.device) -> None:
        """Cut the sequences into blocks of similar lengths."""
        unpad, offset, first = [], 0, 0
        while first < len(lengths_S):
            longest, last = int(lengths_S[first]), first + 1
            while last < len(lengths_S) and (lengths_S[last] >= _LEAST_FILL * longest or last - first < _SMALL_BLOCK):
                last += 1
            block_lengths, steps_L = lengths_S[first:last, None], np.arange(longest)
            index_SL = starts_S[first:last, None] + np.minimum(steps_L, block_lengths - 1)
            self.blocks.append(to_device(torch.from_numpy(index_SL), device))
            unpad.append(np.flatnonzero(steps_L < block_lengths) + offset)
            offset, first = offset + index_SL.size, last
        self.unpad_T = to_device(torch.from_numpy(np.concatenate(unpad)), device)


class PackedCoreAttention(nn.Module):
    """Rotary embedding, then causal attention within each sequence. Takes the place of Megatron-core's own.

    On a GPU in 16 bits, one variable-length flash-attention call. Otherwise one padded
    `scaled_dot_product_attention` per block of similar lengths: padding follows each sequence, so causal masking
    alone keeps the result exact, and a call per sequence would cost a multiple for many short ones.
    """

    def __init__(self, config: DecoderConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.positions = config.positions[layer_number - 1]  # Megatron-core counts the whole model's layers from 1
        self.scale = config.scales.attention

    def forward(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Return the attention's output, [T, H, D]."""
        assert attention_mask is None, "packed sequences are masked by their bounds"
        packed = packed_seq_params
        if self.positions.rotary is not None:
            angles = packed.angles[self.positions.rotary]
            query_THD, key_TGD = _rotate(query_THD, *angles), _rotate(key_TGD, *angles)
        window = self.positions.window
        grouped = query_THD.shape[1] != key_TGD.shape[1]
        if packed.unpad_T is None:
            from torch.nn.attention.varlen import varlen_attn

            groups = {"enable_gqa": grouped} if _varlen_has_enable_gqa() else {}
            return varlen_attn(
                query_THD, key_TGD, value_TGD.contiguous(), packed.cu_seqlens_q, packed.cu_seqlens_kv,
                packed.max_seqlen_q, packed.max_seqlen_kv, scale=self.scale,
                window_size=(-1 if window is None else window - 1, 0), **groups,
            )  # fmt: skip
        outputs = []
        for index_SL in packed.blocks:
            query, key, value = (
                tensor.index_select(0, index_SL.flatten()).unflatten(0, index_SL.shape).transpose(1, 2)
                for tensor in (query_THD, key_TGD, value_TGD)
            )
            length = index_SL.shape[1]
            mask = None if window is None or window >= length else _band(length, window, query.device)
            output_BHLD = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(output_BHLD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, packed.unpad_T)


class PackedSelfAttention(SelfAttention):
    """Megatron-core's self-attention, also where tensor ranks share key/value heads.

    For that case Megatron-core asks its global state for the tensor rank; each role here has its own groups.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Return query [T, 1, H, D], key and value [T, 1, G, D] of this rank's heads."""
        sharing = self.world_size // self.config.num_query_groups
        if sharing <= 1:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
        group, part = divmod(self.tp_group.rank(), sharing)
        dim, num_heads = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        mixed = mixed.unflatten(-1, (self.config.num_query_groups, num_heads + 2, dim))[..., group, :, :]
        query, key, value = mixed.split([num_heads, 1, 1], dim=-2)
        query = query.chunk(sharing, dim=-2)[part]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


@functools.lru_cache(maxsize=4)
def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return which tokens a token attends to, [L, L]: itself and the `window` - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


@functools.cache
def _varlen_has_enable_gqa() -> bool:
    """Return whether `varlen_attn` takes `enable_gqa`. In torch 2.11 it takes grouped heads without that argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash attention over packed sequences can run: on GPUs, in 16 bits."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (i, i + P) of each head's first 2 P dimensions, as Hugging Face models lay them out."""
    rotated = cos_TD.shape[-1]
    if rotated == x_THD.shape[-1]:
        return _Rotation.apply(x_THD, cos_TD[:, None], sin_TD[:, None])
    first, rest = x_THD[..., :rotated], x_THD[..., rotated:]
    return torch.cat([_Rotation.apply(first, cos_TD[:, None], sin_TD[:, None]), rest], dim=-1)


class _Rotation(torch.autograd.Function):
    """A rotation and, backward, the opposite one: four passes over half of the numbers each, and nothing kept."""

    @staticmethod
    def forward(ctx, x_THD, cos_T1D, sin_T1D):
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _rotated(x_THD, cos_T1D, sin_T1D, 1.0)

    @staticmethod
    def backward(ctx, grad_THD):
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _rotated(grad_THD, cos_T1D, sin_T1D, -1.0), None, None


def _rotated(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, sign: float) -> Tensor:
    (left, right), cos, sin = x_THD.chunk(2, dim=-1), cos_T1D.chunk(2, dim=-1)[0], sin_T1D.chunk(2, dim=-1)[0]
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    out_left, out_right = out_THD.chunk(2, dim=-1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin, value=sign)
    return out_THD
