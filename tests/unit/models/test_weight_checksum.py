"""Checksums of slices."""

from __future__ import annotations

import pytest
import torch

from tango_hpc.models.weight_sync.checksum import box_checksum


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(40, 30, generator=torch.Generator().manual_seed(0))


def test_parts_add_up_in_any_cut(matrix: torch.Tensor) -> None:
    whole = int(box_checksum(matrix, ((0, 40), (0, 30))))
    rows = [box_checksum(matrix[a:b], ((a, b), (0, 30))) for a, b in ((0, 7), (7, 40))]
    columns = [box_checksum(matrix[:, a:b], ((0, 40), (a, b))) for a, b in ((0, 11), (11, 12), (12, 30))]
    for parts in (rows, columns):
        assert (sum(int(part) for part in parts) - whole) % 2**64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_shows(matrix: torch.Tensor, dtype: torch.dtype) -> None:
    box = ((0, 40), (0, 30))
    values = matrix.to(dtype)
    sums = {int(box_checksum(values, box))}
    swapped_rows, swapped_columns, one_bit = values.clone(), values.clone(), values.clone()
    swapped_rows[[3, 4]] = values[[4, 3]]
    swapped_columns[:, [0, 29]] = values[:, [29, 0]]
    one_bit[39, 29] = torch.nextafter(values[39, 29], torch.tensor(10.0, dtype=dtype))
    transposed_box = ((1, 41), (0, 30))
    sums |= {int(box_checksum(tensor, box)) for tensor in (swapped_rows, swapped_columns, one_bit)}
    sums.add(int(box_checksum(values, transposed_box)))
    assert len(sums) == 5


def test_vectors_and_zeros() -> None:
    vector = torch.tensor([1.0, -0.0, 3.0])
    assert box_checksum(vector, ((5, 8),)) == box_checksum(torch.tensor([1.0, 0.0, 3.0]), ((5, 8),))
    assert box_checksum(vector, ((5, 8),)) != box_checksum(vector, ((6, 9),))
