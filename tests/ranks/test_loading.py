"""On GPUs each process imports its stage by itself: what goes wrong there is told as anything later is."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tango_hpc.base.config import config_to_yaml
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.heartbeat import read_beat
from tango_hpc.runner.outcome import read_outcome
from tango_hpc.runner.starters import LocalStarter
from tango_hpc.runner.supervisor import Supervisor
from tango_hpc.stages.stage import SFT
from tests.helpers import gpu_node
from tests.helpers.runs import small_config, unseen

TRAINER = Worker(0, "trainer")
HANGS = "import time\ntime.sleep(600)"
LIMIT_SECONDS = 20


def make_supervisor(folder: Path) -> Supervisor:
    overrides = ["launch.device=cuda", "launch.tasks_per_node=1", "generator.parallel.tensor=1"]
    config = small_config(folder / "run", *overrides, f"launch.loading_timeout_seconds={LIMIT_SECONDS}")
    directory, _ = enter_run(config.run.dir, config_to_yaml(config), resume=False, stage="sft")
    console = Console(file=io.StringIO(), width=200)
    starter = LocalStarter(directory, SFT, config, gpu_node.COMMAND)
    return Supervisor(directory, config, ["trainer"], starter, console, unseen)


@pytest.mark.parametrize(
    ("flashinfer", "error"),
    [
        ("raise RuntimeError('no kernels for this card')", "RuntimeError: no kernels for this card"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "Fatal Python error: Segmentation fault"),
        (HANGS, "(limit launch.loading_timeout_seconds)"),
    ],
)
def test_an_import_that_goes_wrong_ends_the_run_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flashinfer: str, error: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", gpu_node.add_flashinfer(tmp_path, flashinfer))
    supervisor, phases, ended = make_supervisor(tmp_path), set(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            phases.add(read_beat(supervisor.directory, TRAINER).phase)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = supervisor.run()
    ended.set()
    watcher.join()
    assert code == 1
    assert isinstance(supervisor.console.file, io.StringIO)
    said = supervisor.console.file.getvalue()
    assert said.startswith("rank 0 (trainer) on ") and "failed in phase 'loading libraries': " in said
    assert error in said and "flashinfer.py" in said
    assert phases <= {"starting", "loading libraries"} and "loading libraries" in phases
    assert (read_outcome(supervisor.directory, TRAINER) is None) == (flashinfer == HANGS)  # that one was killed
    assert not supervisor.starter.running()
