"""Micro-batches by tokens: budget, balance, the same count on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tango_hpc.questions.data.packing import pack, pack_equal


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(50, 1000),
    min_micro_batches=st.integers(1, 4),
)
def test_every_sequence_once_within_the_budget(
    lengths: list[int], num_ranks: int, max_tokens: int, min_micro_batches: int
) -> None:
    packs = pack(lengths, num_ranks=num_ranks, max_tokens=max_tokens, min_micro_batches=min_micro_batches)
    assert len(packs) == num_ranks
    assert len({len(micro_batches) for micro_batches in packs}) == 1
    members = [member for micro_batches in packs for members in micro_batches for member in members]
    assert sorted(members) == list(range(len(lengths)))
    for micro_batches in packs:
        for members in micro_batches:
            assert len(members) <= 1 or sum(lengths[i] for i in members) <= max_tokens
            assert [lengths[i] for i in members] == sorted((lengths[i] for i in members), reverse=True)


def test_ranks_get_equal_loads() -> None:
    lengths = [97, 31, 64, 12, 80, 45, 51, 20, 77, 93, 38, 66]
    packs = pack(lengths, num_ranks=2, max_tokens=200)
    loads = [sum(lengths[i] for members in micro_batches for i in members) for micro_batches in packs]
    assert abs(loads[0] - loads[1]) <= min(lengths)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("max_tokens", [4096, 16384])
def test_skewed_lengths_leave_no_rank_behind(num_ranks: int, max_tokens: int) -> None:
    """The longest rank is at most 5% over the mean, with lengths from 20 to 2,048 of which few are long."""
    random = np.random.default_rng(0)
    for lengths in (random.lognormal(5.5, 1, 640), random.pareto(1.2, 640) * 100 + 20):
        lengths = lengths.clip(20, 2048).astype(int).tolist()
        packs = pack(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
        loads = [sum(lengths[i] for members in micro_batches for i in members) for micro_batches in packs]
        assert max(loads) <= 1.05 * sum(loads) / num_ranks


def test_empty_micro_batches_fill_up() -> None:
    assert pack([10], num_ranks=3, max_tokens=100) == [[[0]], [[]], [[]]]
    assert pack([], num_ranks=2, max_tokens=100) == [[[]], [[]]]


@pytest.mark.parametrize(("num_sequences", "expected"), [(8, 4), (3, 2), (1, 1)])
def test_a_pipeline_gets_micro_batches_to_overlap(num_sequences: int, expected: int) -> None:
    packs = pack([10] * num_sequences, num_ranks=2, max_tokens=1000, min_micro_batches=4)
    assert [len(micro_batches) for micro_batches in packs] == [expected] * 2


@settings(deadline=None)
@given(
    length=st.integers(1, 50),
    count=st.integers(1, 60),
    num_ranks=st.integers(1, 8),
    max_tokens=st.integers(50, 300),
    min_micro_batches=st.integers(1, 4),
)
def test_sequences_of_one_length_are_counted_as_they_are_packed(length: int, count: int, **sizes: int) -> None:
    packed = pack([length] * count, **sizes)
    found = len(packed[0]), max(len(members) for rank in packed for members in rank)
    assert pack_equal(length, count, **sizes) == found
