"""Position-dependent checksums of slices, which add up over any disjoint cover of a tensor.

The checksum of a box is the sum over its elements of bits * row weight * column weight, modulo 2^64, where the
weights are odd pseudo-random 64-bit numbers of the element's row and column in the whole Hugging Face tensor. It does
not depend on how the tensor is cut, and changes when any element changes or moves.
"""

from __future__ import annotations

import torch

from tango_hpc.models.layout.trainer_layout import Box

_CHUNK_ELEMENTS = 2**21
_BITS = {2: torch.int16, 4: torch.int32}


def box_checksum(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return checksum (scalar int64) of `values`, which are the elements of `box`; a negative zero counts as a zero."""
    matrix = values if values.dim() == 2 else values.unsqueeze(1)
    columns = box[1] if len(box) == 2 else (0, 1)
    assert matrix.shape == (box[0][1] - box[0][0], columns[1] - columns[0]), (matrix.shape, box)
    row_weights = _weights(box[0], 1, values.device)
    column_weights = _weights(columns, 2, values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, _CHUNK_ELEMENTS // matrix.shape[1])
    for start in range(0, matrix.shape[0], step):
        part = (matrix[start : start + step] + 0.0).contiguous()
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        total += ((bits * column_weights).sum(1) * row_weights[start : start + step]).sum()
    return total


def _weights(span: tuple[int, int], salt: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random 64-bit numbers for a range of indices (the mixer of splitmix64)."""
    x = torch.arange(*span, dtype=torch.int64, device=device) * 2 + salt * 0x632BE59BD9B4E019 % 2**63
    for multiplier, shift in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27)):
        x = (x ^ (x >> shift)) * multiplier
    return (x ^ (x >> 31)) | 1
