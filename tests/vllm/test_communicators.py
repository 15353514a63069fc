"""A real trainer, engine and weight sync on four ranks make the groups that `tango plan` counts, and no others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config import Config
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.plan.communicators import role_communicators
from tests.helpers.process_groups import groups_of_this_process
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import prepare_small_run

RANKS = 4


def take_a_step(config: Config, folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """A rollout, an update, a weight sync and a checkpoint of the generator; the groups that this rank then has."""
    from vllm.distributed import parallel_state

    from tango_hpc.base.types import GenerationRequest, SamplingSettings
    from tango_hpc.models.trainer.loss import Batch, LossSettings
    from tango_hpc.stages.model_worker import ModelWorker
    from tests.helpers.sequences import random_sequences

    worker = ModelWorker("generator", config, total_steps=2)
    worker.sync()
    requests = [GenerationRequest([1, 2, 3], seed) for seed in range(8)]
    worker.generate(requests, SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=4), lambda done, total: None)
    batches = [Batch(random_sequences(8, 20), LossSettings())]
    worker.prepare(batches)
    worker.update(batches, 1)
    worker.sync()
    worker.begin_save(folder, background=False)
    worker.end_save()
    coordinators: list[Any] = [found for found in (made() for made in parallel_state._groups.values()) if found]
    return {
        "torch": groups_of_this_process(),
        "vllm": [tuple(found.ranks) for found in coordinators if found.world_size > 1],
        "communicators": [tuple(found.ranks) for found in coordinators if found.device_communicator],
    }


def trainer_groups(made: dict[str, list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """The groups that are not vLLM's, whose coordinators have two each: one for the GPU, one for the host."""
    groups = Counter(made["torch"])
    groups.subtract(2 * made["vllm"])
    assert min(groups.values()) >= 0
    return sorted(groups.elements())


@pytest.mark.parametrize(("tensor", "pipeline", "rollout"), [(2, 1, 2), (1, 1, 4), (1, 2, 1)])
def test_a_role_makes_the_groups_that_the_plan_counts(tmp_path: Path, tensor: int, pipeline: int, rollout: int) -> None:
    config, _ = prepare_small_run(
        tmp_path / "run",
        f"launch.tasks_per_node={RANKS}",
        f"generator.parallel.tensor={tensor}",
        f"generator.parallel.pipeline={pipeline}",
        f"generator.rollout.tensor={rollout}",
        "sft.generator.init.build.num_heads=4",
        "sft.generator.init.build.num_kv_heads=4",
        "sft.generator.init.build.hidden_size=128",
    )
    counted = role_communicators(RANKS, tensor=tensor, pipeline=pipeline, rollout_tensor=rollout)
    for rank, made in enumerate(run_ranks(take_a_step, RANKS, config, tmp_path / "saved")):
        assert trainer_groups(made) == [members for members in counted["trainer"] if rank in members]
        assert made["communicators"] == [members for members in counted["engine"] if rank in members]

    assert make_plan(config, gpu_gb=80, node_gb=None)["communicators"] is None  # NCCL has no part on a CPU
    launch = config.launch.model_copy(update={"device": "cuda"})
    planned = make_plan(config.model_copy(update={"launch": launch}), gpu_gb=80, node_gb=None)["communicators"]
    assert planned["roles"]["generator"] == {part: len(found) for part, found in counted.items()}
