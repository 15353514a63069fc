"""Packed attention against textbook attention, one sequence and one head at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tango_hpc.base.families import Scales
from tango_hpc.models.trainer.attention import PackedCoreAttention, PackedSequences
from tango_hpc.models.trainer.rotary import LayerPositions, Rotary

FREQUENCIES = [Rotary(torch.tensor([1.0, 0.1, 0.01, 0.001]))]


def textbook(query_TD: Tensor, key_TD: Tensor, value_TD: Tensor, window: int, scale: float) -> Tensor:
    """Causal attention of one head to `window` tokens, with rotation by complex numbers."""

    def rotated(x_TD: Tensor) -> Tensor:
        pairs = torch.complex(*x_TD.chunk(2, dim=-1))
        turns = torch.outer(torch.arange(len(x_TD), dtype=torch.float64), FREQUENCIES[0].frequencies_P.double())
        pairs = pairs * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    scores = rotated(query_TD) @ rotated(key_TD).t() * scale
    steps = torch.arange(len(scores))
    ago = steps[:, None] - steps
    scores = scores.masked_fill((ago < 0) | (ago >= window), -torch.inf)
    return scores.softmax(-1) @ value_TD


@pytest.mark.parametrize(("window", "scale"), [(None, None), (5, 0.2), (1, None)])
@pytest.mark.parametrize("lengths", [[5], [9, 9, 9], [40, 31, 30, 12, 3, 1], [7] + [2] * 20 + [1]])
def test_matches_each_sequence_alone(lengths: list[int], window: int | None, scale: float | None) -> None:
    torch.manual_seed(0)
    num_tokens, heads, groups, dim = sum(lengths), 4, 2, 8
    query, key, value = (
        torch.randn(num_tokens, n, dim, dtype=torch.float64, requires_grad=True) for n in (heads, groups, groups)
    )
    packed = PackedSequences.of_lengths(lengths, FREQUENCIES, torch.float64, torch.device("cpu"))
    packed.angles = [_exact_angles(lengths)]
    settings = SimpleNamespace(positions=[LayerPositions(window)], scales=Scales(attention=scale))
    output = PackedCoreAttention(settings, 1)(query, key, value, packed_seq_params=packed)
    expected, start = torch.empty_like(output), 0
    for length in lengths:
        part = slice(start, start + length)
        for head in range(heads):
            group = head // (heads // groups)
            expected[part, head] = textbook(
                query[part, head], key[part, group], value[part, group], window or 100, scale or 1 / math.sqrt(dim)
            )
        start += length
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    inputs = (query, key, value)
    torch.testing.assert_close(
        torch.autograd.grad((output * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs)
    )


def test_angles_restart_with_each_sequence() -> None:
    packed = PackedSequences.of_lengths([3, 2], FREQUENCIES, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(packed.angles[0][0][:, 0], torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0]).cos())
    assert packed.cu_seqlens_q.tolist() == [0, 3, 5]


def _exact_angles(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The angles in float64, so that the comparison is not limited by the product's float32 table."""
    positions = torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths])
    angles = torch.outer(positions, FREQUENCIES[0].frequencies_P.double()).repeat(1, 2)
    return angles.cos(), angles.sin()
