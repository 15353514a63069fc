"""How much host memory a job of several stages needs on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from tango_hpc.base.config import Config
from tango_hpc.plan.memory import copied_in_fine_tuning, plan_memory
from tango_hpc.plan.sizes import GPU_PROCESS_BYTES, SAVE_BYTES
from tango_hpc.stages.processes import PlannedStage, as_in_stage


def job_node_bytes(config: Config, stages: Sequence[str]) -> int:
    """Host memory that `stages`, one after the other, need on a node with GPUs at the fullest moment, in bytes.

    Raises UserError where a model's sizes are not known.
    """
    assert config.launch.device == "cuda", "on a CPU weight syncs take host memory too"
    needed = []
    for stage in stages:
        if stage == "sft":  # one process on each rank, whose trainer stays on the GPU
            copies = copied_in_fine_tuning(config) if config.checkpoint.background else 0
            needed.append(config.launch.tasks_per_node * (GPU_PROCESS_BYTES + SAVE_BYTES) + copies)
            continue
        planned: PlannedStage = next(name for name in get_args(PlannedStage) if name == stage)
        plan = plan_memory(
            as_in_stage(config, planned), gpu_gb=0, node_gb=None, sync_bytes={}, takes_checkpoints=stage == "eval"
        )
        needed.append(max(phase.total for phase in plan.node))
    return max(needed)
