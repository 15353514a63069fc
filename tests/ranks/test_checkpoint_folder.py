"""Checkpoints are complete or not there: a failed save on one rank leaves the last good one in place, on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc.errors import CheckFailed
from tango_hpc.run.directory import RunDirectory
from tests.helpers.ranks import run_ranks


class Part:
    """Stands where a policy stands; each rank writes one file."""

    def __init__(self, value: int, full_disk: bool = False) -> None:
        self.value, self.full_disk = value, full_disk

    def save(self, folder: Path) -> None:
        import torch.distributed as dist

        folder.mkdir(exist_ok=True)
        if self.full_disk and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        (folder / f"rank_{dist.get_rank()}").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        import torch.distributed as dist

        self.value = int((folder / f"rank_{dist.get_rank()}").read_text())


def save_and_load(path: Path) -> list[str]:
    from tango_hpc.parallel.exchange import Exchange
    from tango_hpc.policy.checkpoints import Checkpoints

    directory, exchange = RunDirectory(path), Exchange(["generator"], "generator")
    checkpoints = Checkpoints(directory, "train", keep=2, exchange=exchange)
    assert checkpoints.latest() is None
    for step, phase in ((1, ""), (2, "rollout"), (2, ""), (2, "verify")):
        checkpoints.save(step, phase, {"generator": Part(step)}, {"step": step, "phase": phase})
    with pytest.raises(
        CheckFailed, match=r"could not save .*step_000003.*No space left.*step_000002\+verify.*--resume"
    ):
        checkpoints.save(3, "", {"generator": Part(3, full_disk=True)}, {"step": 3})
    restarted = Checkpoints(directory, "train", keep=2, exchange=exchange)
    latest = restarted.latest()
    assert latest is not None
    part = Part(0)
    state = restarted.load(latest, {"generator": part})
    assert (state, part.value) == ({"step": 2, "phase": "verify"}, 2)
    return sorted(entry.name for entry in latest.parent.iterdir())


def test_a_full_disk_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    for names in run_ranks(save_and_load, 2, tmp_path):
        assert names == ["step_000002+rollout", "step_000002+verify"]
