"""The process groups that torch.distributed has made."""

from __future__ import annotations

import torch.distributed as dist


def groups_of_this_process() -> list[tuple[int, ...]]:
    """Return the members of each group of two or more ranks that this process is in, sorted."""
    ranks = dist.distributed_c10d._world.pg_group_ranks
    return sorted(tuple(members) for members in ranks.values() if len(members) > 1)
