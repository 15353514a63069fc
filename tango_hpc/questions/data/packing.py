"""Spread sequences over data-parallel ranks and micro-batches, by tokens. Pure Python."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def pack(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, min_micro_batches: int = 1
) -> list[list[list[int]]]:
    """Return micro-batches of each rank, as lists of indices into `lengths`, longest sequence first.

    Every rank gets the same number of micro-batches, some of which may be empty. None holds more than
    `max_tokens`, unless a single sequence does. Longest-first assignment to the lightest bin keeps the loads of
    all bins, hence of all ranks, close to each other. `min_micro_batches` per rank keep a pipeline busy, as far as
    there are sequences.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_rank = max(1, math.ceil(sum(lengths) / (max_tokens * num_ranks)))
    per_rank = max(per_rank, min(min_micro_batches, math.ceil(len(lengths) / num_ranks)))
    while True:
        bins = _fill(lengths, order, per_rank * num_ranks)
        if all(len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens for members in bins):
            break
        per_rank += 1
    # Heaviest to lightest, dealt back and forth, evens out what the bins still differ by.
    bins.sort(key=lambda members: -sum(lengths[i] for i in members))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for index, members in enumerate(bins):
        turn, position = divmod(index, num_ranks)
        ranks[position if turn % 2 == 0 else num_ranks - 1 - position].append(members)
    return ranks


def pack_equal(
    length: int, count: int, *, num_ranks: int, max_tokens: int, min_micro_batches: int = 1
) -> tuple[int, int]:
    """Return how many micro-batches `pack` gives each rank of `count` sequences of one length, and the sequences in the
    fullest.
    """
    per_rank = math.ceil(count / num_ranks)
    micro_batches = max(math.ceil(per_rank / max(max_tokens // length, 1)), min(min_micro_batches, per_rank))
    return micro_batches, math.ceil(per_rank / micro_batches)


def _fill(lengths: Sequence[int], order: Sequence[int], num_bins: int) -> list[list[int]]:
    """Put each sequence into the lightest bin."""
    heap = [(0, index) for index in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i in order:
        load, index = heapq.heappop(heap)
        bins[index].append(i)
        heapq.heappush(heap, (load + lengths[i], index))
    return bins
