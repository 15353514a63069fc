"""Groups that ranks make after some of them had no part in another one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def sums_in_later_groups() -> list[float]:
    """A pipeline of three stages, then groups made anew; what is summed in one of either."""
    from tango_hpc.models.parallel.groups import PolicyGroups, forget_groups

    sums = []
    for cut in ((1, 3), (3, 1)):
        group = PolicyGroups.create(*cut).model
        forget_groups()
        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value, group=group)
        sums.append(float(value))
    return sums


def test_groups_made_after_a_pipeline_of_three_meet() -> None:
    assert run_ranks(sums_in_later_groups, 3) == [[6.0, 6.0]] * 3
