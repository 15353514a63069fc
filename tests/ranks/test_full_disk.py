"""A disk that is really full: data are safe, and whoever has a terminal reads which path lacks how much room."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from tango_hpc.base.config.schema import CheckpointConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.enter import prepare_run, prepared_run
from tango_hpc.runner.heartbeat import is_loading
from tango_hpc.runner.job import run_attempt
from tango_hpc.runner.starters import LocalStarter
from tango_hpc.runner.supervisor import Supervisor
from tango_hpc.stages.stage import TRAIN
from tests.helpers.counter_rank import RANK_COMMAND, counted, fill
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import unseen
from tests.slurm.jobs import counting_config

DISK_BYTES = 8 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_rank_that_meets_a_full_disk_is_told_of_with_the_path(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGO_RANK_COMMAND", shlex.join(RANK_COMMAND))
    how = {"rank": 1, "step": 3, "action": "full", "save_every": 1, "steps": 5, "once": False}
    config = counting_config(disk, "run", {"nodes": 1, "tasks_per_node": 2}, **how)
    shown = io.StringIO()
    with prepared_run([TRAIN], config, resume=False) as entry:
        directory = entry.directory
        assert run_attempt(entry.directory, TRAIN, config, Console(file=shown, width=300), entry) == 78
    text = shown.getvalue()
    dump = directory.rollout_file("generator", 2)
    assert re.search(
        rf"rank 1 \(generator\) .*No space left on device: {re.escape(str(dump))} \(0 MB free there\); make", text
    )
    assert "Traceback" not in text
    for file in directory.path.glob("filling_*"):
        file.unlink()
    assert not list(directory.outcomes.glob("*.reserve")) and counted(directory) == 3
    how["action"] = "none"
    config = counting_config(disk, "run", {"nodes": 1, "tasks_per_node": 2}, **how)
    with prepared_run([TRAIN], config, resume=True) as entry:
        assert run_attempt(entry.directory, TRAIN, config, Console(file=shown), entry) == 0
    assert counted(directory) == 5 and AttemptLog(directory).read()[-1].code == 0


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_signal_on_a_full_disk_ends_no_run_and_is_passed_on_when_there_is_room(disk: Path, is_freed: bool) -> None:
    launch = {"nodes": 1, "tasks_per_node": 1, "grace_seconds": 60 if is_freed else 3}
    config = counting_config(disk, "run", launch, steps=100_000, step_seconds=0.05)
    directory = prepare_run([TRAIN], config, resume=False)
    shown = io.StringIO()
    starter = LocalStarter(directory, TRAIN, config, RANK_COMMAND)
    supervisor = Supervisor(directory, config, ["generator"], starter, Console(file=shown, width=300), unseen)

    def fill_and_signal() -> None:
        while is_loading(directory) or not any("rollout" in f.read_text() for f in directory.heartbeats.glob("rank_*")):
            time.sleep(0.1)
        fill(directory.path)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
        assert not directory.stop_file.exists() and starter.running(), "it could not be left, and ended nothing"
        if is_freed:
            for file in directory.path.glob("filling_*"):
                file.unlink()

    with ThreadPoolExecutor() as beside:
        told = beside.submit(fill_and_signal)
        code = supervisor.run()
        told.result()
    assert "SIGTERM (preempted or cancelled): saving at the next safe point" in shown.getvalue()
    if is_freed:
        assert code == 85 and counted(directory) >= 1
    else:
        assert code == 78 and "the ranks could not be told: No space left on device:" in shown.getvalue()
        assert f"{directory.stop_file}" in shown.getvalue() and "continue with --resume" in shown.getvalue()


def save_two(path: Path, background: bool) -> list[str]:
    """A checkpoint that fits the disk, then one that does not."""
    import torch.distributed as dist

    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.trainer.checkpoints import Checkpoints
    from tests.ranks.test_policy_state import make_policy

    exchange = Exchange(["generator"], "generator")
    checkpoints = Checkpoints(RunDirectory(path), "train", CheckpointConfig(keep=2), exchange)
    policy = make_policy(path.parent.parent, 2, 1)
    checkpoints.save(1, "", {"generator": policy}, {"step": 1})
    used = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    dist.barrier()
    if dist.get_rank() == 0:  # room for half of another
        (path / "other data").write_bytes(bytes(DISK_BYTES - used - used // 2))
    dist.barrier()
    with pytest.raises(CheckFailed) as failure:
        checkpoints.save(2, "", {"generator": policy}, {"step": 2}, background=background)
        assert background, "in front it is told at once"
        checkpoints.complete()
    again = Checkpoints(RunDirectory(path), "train", CheckpointConfig(keep=2), exchange)
    assert again.latest() == path / "checkpoints/train/step_000001" and again.set_aside == []
    return [str(failure.value), *sorted(file.name for file in (path / "checkpoints/train").iterdir())]


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_does_not_fit_leaves_its_room_and_says_how_much_it_needs(
    disk: Path, background: bool
) -> None:
    from tests.helpers.tiny import make_tiny_hf

    make_tiny_hf(disk.parent / "model")
    first, second = run_ranks(save_two, 2, disk / "run", background, timeout=300)
    assert first == second
    message, *there = first
    assert there == ["step_000001"], "the half-written one is gone"
    files = [file for file in (disk / "run/checkpoints/train/step_000001").rglob("*") if file.is_file()]
    total = sum(file.stat().st_size for file in files if file.name != "manifest.json")
    tensors = sum(file.stat().st_size for file in files if file.suffix == ".distcp")
    pattern = (
        r"could not save (\S+step_000002) \(0\.0 GB free there, the last one took (\S+) GB\): OSError: rank \d: .*"
        r"No space left on device: '(\S+)'.* \(the files of the generator need (\S+) GB\)\. .*--resume\."
    )
    match = re.fullmatch(pattern, message, re.DOTALL)
    assert match is not None, message
    assert match[3].startswith(str(disk / "run/checkpoints/train/.step_000002/generator/__"))
    assert float(match[2]) * 2**30 == pytest.approx(total, rel=0.01)
    assert 0.7 * tensors < float(match[4]) * 2**30 < tensors  # around each of the small tensors here lies a header
