"""Room on the disk for the checkpoints of a stage, looked at before anything loads."""

from __future__ import annotations

import shutil

from rich.filesize import decimal

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import STEPPED_STAGES
from tango_hpc.base.run.step_names import leftovers_in, steps_in
from tango_hpc.base.run.weights_alone import whole_in
from tango_hpc.plan.memory import MemoryPlan, plan_memory


def checkpoint_bytes(config: Config, stage: str) -> int:
    """The largest checkpoint of `stage`, of all ranks together: training writes both roles, fine-tuning one at a time.

    Raises UserError where a model's sizes are not known.
    """
    by_role = _plan(config).checkpoint_bytes
    if stage == "sft":
        return max((size for name, size in by_role.items() if getattr(config.sft, name) is not None), default=0)
    return sum(by_role.values())


def _plan(config: Config) -> MemoryPlan:
    return plan_memory(config, gpu_gb=0, node_gb=None, sync_bytes={})


def check_disk(directory: RunDirectory, config: Config, stage: str) -> str | None:
    """What to tell the user where the disk has no room for all checkpoints to come; None where it has, or nobody knows.

    Raises UserError where there is not even room for one. A quota below what the file system has free is not seen.
    """
    if stage not in STEPPED_STAGES:
        return None
    try:
        one = checkpoint_bytes(config, stage)
    except UserError:  # sizes are not known; what reads the model says so
        return None
    keep, keep_weights = config.checkpoint.keep, config.checkpoint.keep_weights if stage == "train" else 0
    # The oldest goes, or its weights alone stay, when the newest is complete.
    folder = directory.checkpoints / stage
    whole, saved = len(whole_in(folder)), len(steps_in(folder))
    to_come = (max(keep - whole, 0) + 1) * one
    if keep_weights:
        to_come += max(keep_weights - (saved - min(whole, keep)), 0) * sum(_plan(config).weights_bytes.values())
    files = (file for leftover in leftovers_in(folder) for file in leftover.rglob("*") if file.is_file())
    free = shutil.disk_usage(directory.path).free + sum(file.stat().st_size for file in files)
    there = f"{decimal(free)} are free at {directory.path}"
    if free < one:
        raise UserError(f"no room for a checkpoint: it takes {decimal(one)}, and {there}; make room, or set run.dir")
    if free < to_come:
        weights = f", weights alone of {keep_weights}" if keep_weights else ""
        return (
            f"checkpoints will need {decimal(to_come)} more ({decimal(one)} each, {keep} kept and one being written"
            f"{weights}), and {there}: make room, or lower checkpoint.keep{' or keep_weights' if keep_weights else ''}, or "
            "the run ends when the disk is full"
        )
    return None
