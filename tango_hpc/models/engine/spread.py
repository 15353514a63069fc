"""The spread of requests over rollout groups. Pure Python."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from tango_hpc.base.types import GenerationRequest


def spread_requests(requests: Sequence[GenerationRequest], num_groups: int, max_tokens: int) -> list[list[int]]:
    """Return indices of `requests` for each of `num_groups` engines, every index once, each list in rising order.

    Requests with one prompt stay together, so that its prefill is shared, up to an equal share of all requests.
    The expected work of a request is its prompt plus `max_tokens`; the heaviest lot goes to the lightest group.
    """
    if num_groups == 1:
        return [list(range(len(requests)))]
    lots: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        lots[tuple(request.prompt_ids)].append(index)
    share = max(1, math.ceil(len(requests) / num_groups))
    cut = [(prompt, lot[at : at + share]) for prompt, lot in lots.items() for at in range(0, len(lot), share)]
    cut.sort(key=lambda item: (-len(item[1]) * (len(item[0]) + max_tokens), item[1][0]))
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]
    for prompt, lot in cut:
        load, group = heapq.heappop(loads)
        groups[group] += lot
        heapq.heappush(loads, (load + len(lot) * (len(prompt) + max_tokens), group))
    return [sorted(group) for group in groups]
