"""Weights alone: what stays of a checkpoint that is too old for `checkpoint.keep`, for evaluation and export. No torch.

The folder keeps its name and its files of weights, so that a reader of weights is not disturbed. Its manifest decides:
once the manifest lists no state of the run, the checkpoint is weights alone, and the other files can go.
"""

from __future__ import annotations

from pathlib import Path

from tango_hpc.base.files import flush_to_disk
from tango_hpc.base.run.manifest import read_manifest, write_manifest
from tango_hpc.base.run.step_names import StepName, steps_in

STATE = "state.json"
# Ends of the names of a rank's files: of those that evaluation and export read, and of those that only training reads.
WEIGHTS, TRAINING = "weights.distcp", "training.distcp"


def is_for_readers(name: str) -> bool:
    """Return whether evaluation and export read a file of a checkpoint."""
    return name != STATE and not name.endswith(TRAINING)


def is_whole(checkpoint: Path) -> bool:
    """Return whether a run can go on from a checkpoint. One with a damaged manifest counts: its reader names the
    damage.
    """
    try:
        return STATE in read_manifest(checkpoint)
    except ValueError:
        return True


def whole_in(folder: Path) -> list[tuple[StepName, Path]]:
    """Return the checkpoints in `folder` that a run can go on from, the oldest first."""
    return [(name, path) for name, path in steps_in(folder) if is_whole(path)]


def only_weights(folder: Path) -> str | None:
    """Return why a run cannot go on from the checkpoints in `folder`, if weights alone are left there."""
    saved = steps_in(folder)
    if not saved or whole_in(folder):
        return None
    name, path = saved[-1]
    return (
        f"{path} holds weights alone, and a run goes on from a whole checkpoint, which has optimizers too: bring one"
        f" back from a copy, or begin another run with these weights: tango export RUN --role ROLE --step {name.step}"
        " --out DIR, then ROLE.model.path=DIR run.dir=PATH"
    )


def keep_weights(checkpoint: Path) -> None:
    """Turn a checkpoint into weights alone. A kill at any moment leaves it whole, or weights that can be read.

    Raises ValueError for a damaged manifest: it alone says what the folder holds.
    """
    sums = read_manifest(checkpoint)
    write_manifest(checkpoint, {name: entry for name, entry in sums.items() if is_for_readers(name)})
    flush_to_disk(checkpoint)  # a power cut must not bring the old manifest back when files are gone
    remove_training(checkpoint)


def remove_training(checkpoint: Path) -> None:
    """Delete what weights alone do not need, which a kill may have left."""
    for path in checkpoint.rglob("*"):
        if path.is_file() and not is_for_readers(path.name):
            path.unlink()
