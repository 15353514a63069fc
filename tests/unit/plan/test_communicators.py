"""The NCCL communicators that `tango plan` counts are the groups that trainers make; engines' are in tests/vllm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tango_hpc.base.config import load_config
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.ranks import shutdown_distributed
from tango_hpc.plan.communicators import count_communicators, role_communicators
from tests.helpers.process_groups import groups_of_this_process
from tests.helpers.recipes import recipe

CONFIGS = Path(__file__).parents[3] / "configs"
# World size, tensor, pipeline: those of the recipes, and cuts in which some of the axes coincide.
CUTS = [(4, 2, 1), (8, 2, 1), (32, 2, 1), (8, 1, 1), (8, 8, 1), (4, 2, 2), (8, 2, 2), (8, 1, 4), (8, 1, 8)]


@pytest.mark.parametrize(("world_size", "tensor", "pipeline"), CUTS)
def test_the_groups_of_a_trainer_are_those_that_are_counted(world_size: int, tensor: int, pipeline: int) -> None:
    counted = role_communicators(world_size, tensor=tensor, pipeline=pipeline, rollout_tensor=1)
    assert counted["engine"] == []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        PolicyGroups.create(tensor, pipeline)
        made = groups_of_this_process()
        shutdown_distributed()
        assert made == [members for members in counted["trainer"] if rank in members]


@pytest.mark.parametrize(
    ("name", "per_node", "per_gpu"),
    [
        ("1x4/qwen_grpo_tango", 14, 8),
        ("1x8/qwen_grpo_tango", 22, 8),
        ("4x8/qwen_grpo_tango", 22, 8),
        ("4x8/qwen_grpo_vanilla", 11, 4),
        ("quickstart_gpu", 0, 0),
    ],
)
def test_what_the_recipes_make(name: str, per_node: int, per_gpu: int) -> None:
    """By hand, for a role on 8 GPUs at tensor size 2: 4 tensor pairs, 2 data groups, all ranks; 4 pairs of the
    engine.
    """
    found = count_communicators(recipe(name) if "/" in name else load_config(CONFIGS / f"{name}.yaml"))
    assert (found["per_node"], found["per_gpu"]) == (per_node, per_gpu)
    assert sum(sum(parts.values()) for parts in found["roles"].values()) == per_node


def test_a_role_that_is_not_trained_has_an_engine_alone() -> None:
    changes = ["verifier.trainable=false", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0"]
    config = recipe("1x8/qwen_grpo_tango", changes)
    assert count_communicators(config)["roles"]["verifier"] == {"trainer": 0, "engine": 4}
    assert count_communicators(config, takes_checkpoints=True)["roles"]["verifier"] == {"trainer": 7, "engine": 4}
