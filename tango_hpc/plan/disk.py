"""Room on the disk for the checkpoints of a stage, looked at before anything loads."""

from __future__ import annotations

import shutil

from rich.filesize import decimal

from tango_hpc.base.config.schema import CheckpointConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.step_names import leftovers_in, steps_in
from tango_hpc.base.run.weights_alone import whole_in


def note_on_disk(directory: RunDirectory, stage: str, settings: CheckpointConfig, one: int, weights: int) -> str | None:
    """Return what to tell the user where the disk has no room for all checkpoints to come, else None.

    `one` is the bytes of a checkpoint, `weights` those of one kept as weights alone (0: none is). Raises UserError
    where not even one checkpoint fits. A quota below what the file system has free is not seen.
    """
    folder = directory.checkpoints / stage
    whole, saved = len(whole_in(folder)), len(steps_in(folder))
    # The oldest goes, or its weights alone stay, when the newest is complete.
    to_come = (max(settings.keep - whole, 0) + 1) * one
    if weights:
        to_come += max(settings.keep_weights - (saved - min(whole, settings.keep)), 0) * weights
    files = (file for leftover in leftovers_in(folder) for file in leftover.rglob("*") if file.is_file())
    free = shutil.disk_usage(directory.path).free + sum(file.stat().st_size for file in files)
    left = f"{decimal(free)} are free at {directory.path}"
    if free < one:
        raise UserError(f"no room for a checkpoint: it takes {decimal(one)}, and {left}; make room, or set run.dir")
    if free < to_come:
        alone = f", weights alone of {settings.keep_weights}" if weights else ""
        return (
            f"checkpoints will need {decimal(to_come)} more ({decimal(one)} each, {settings.keep} kept and one being"
            f" written{alone}), and {left}: make room, or lower checkpoint.keep{' or keep_weights' if weights else ''},"
            " or the run ends when the disk is full"
        )
    return None
