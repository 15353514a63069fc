"""What stays of a checkpoint as weights alone: at every moment of it a reader finds what it looks for."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.manifest import find_damage, read_manifest, sum_of, write_manifest, wrong_contents
from tango_hpc.base.run.summary import update_summary
from tango_hpc.base.run.weights_alone import (
    is_for_readers,
    is_whole,
    keep_weights,
    only_weights,
    remove_training,
    whole_in,
)
from tango_hpc.runner.attempts import newest_checkpoint
from tango_hpc.runner.enter import prepare_run
from tango_hpc.stages.stage import TRAIN
from tests.slurm.jobs import counting_config

OF_WEIGHTS = {f"{role}/{name}" for role in ("generator", "verifier") for name in (".metadata", "__0_weights.distcp")}
OF_TRAINING = {
    "state.json",
    *(f"{role}/__{rank}_training.distcp" for role in ("generator", "verifier") for rank in (0, 1)),
}


def make_checkpoint(folder: Path) -> Path:
    """A whole checkpoint of two roles."""
    for name in OF_WEIGHTS | OF_TRAINING:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"contents of {name}")
    write_manifest(folder, {name: sum_of(folder / name) for name in OF_WEIGHTS | OF_TRAINING})
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def is_killed(checkpoint: Path, number: int) -> bool:
    """Turn a checkpoint into weights alone, killed right before its `number`-th call that opens, renames or removes."""
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def kill(event: str, _: object) -> None:
            if event in ("open", "os.rename", "os.remove") and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            keep_weights(checkpoint)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_leaves_it_whole_or_weights_that_can_be_read(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "step_000010")
    known = {name: entry for name, entry in read_manifest(original).items() if is_for_readers(name)}
    assert known.keys() == OF_WEIGHTS and is_whole(original)
    seen = []
    for number in itertools.count(1):
        checkpoint = tmp_path / str(number) / "step_000010"
        shutil.copytree(original, checkpoint)
        if not is_killed(checkpoint, number):
            break
        seen.append(is_whole(checkpoint))
        assert find_damage(checkpoint) is None, number
        assert list(wrong_contents(checkpoint, known)) == [], "a reader who had begun before"
        if not is_whole(checkpoint):  # what the next attempt does at its start
            remove_training(checkpoint)
            assert files_in(checkpoint) == OF_WEIGHTS | {"manifest.json"}
    assert seen.count(True) >= 3 and seen.count(False) >= len(OF_TRAINING), "it was not killed on both sides"
    assert files_in(checkpoint) == OF_WEIGHTS | {"manifest.json"} and find_damage(checkpoint) is None


def test_a_run_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    folder = directory.checkpoints / "train"
    assert only_weights(folder) is None
    old, new = (make_checkpoint(folder / f"step_{step:06d}") for step in (10, 20))
    keep_weights(old)
    assert [path for _, path in whole_in(folder)] == [new] and only_weights(folder) is None
    keep_weights(new)
    assert newest_checkpoint(directory, "train") is None
    with pytest.raises(
        UserError, match=r"step_000020 holds weights alone.*bring one back.*tango export RUN .*--step 20"
    ):
        prepare_run([TRAIN], config, resume=True)
    update_summary(directory, "train", "done")  # nothing is to be done
    prepare_run([TRAIN], config, resume=True)


def test_a_damaged_manifest_is_not_taken_for_weights_alone(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "step_000010")
    (checkpoint / "manifest.json").write_text("{")
    assert is_whole(checkpoint) and only_weights(tmp_path) is None
    with pytest.raises(ValueError, match="damaged"):
        keep_weights(checkpoint)
    assert files_in(checkpoint) >= OF_TRAINING
