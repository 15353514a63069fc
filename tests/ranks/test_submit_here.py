"""`tango submit --cluster local`: the same job in the background of this machine, with counting ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tango_hpc import submit
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.status import run_state, show_logs
from tango_hpc.commands.sweep import load_sweep
from tango_hpc.runner.heartbeat import is_loading
from tests.helpers.counter_rank import counted
from tests.slurm.jobs import PROFILE, ROOT, counting_config, tango, wait_until


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_in_the_background(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    config = counting_config(folder, "run", {"nodes": 1, "tasks_per_node": 2}, steps=3)
    job = submit("train", config, profile=PROFILE, cluster="local")
    assert job.result()["stages"]["train"]["status"] == "done"
    directory = RunDirectory(config.run.dir)
    assert counted(directory) == 3
    assert f"{directory.snapshot}/tango_hpc" in directory.log_file(Worker(1, "generator")).read_text()
    assert run_state(directory, {}).state == "done"


def counting(directory: RunDirectory) -> bool:
    """Whether two steps are done, and the heartbeat has told of a safe point."""
    log = directory.log_file(Worker(0, "generator"))
    return log.exists() and "step 2\n" in log.read_text() and not is_loading(directory)


def test_stop_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1, "tasks_per_node": 2}, steps=4000, step_seconds=0.05)
    submit("train", config, profile=PROFILE, cluster="local")
    directory = RunDirectory(config.run.dir)
    wait_until(lambda: counting(directory))
    assert run_state(directory, {}).state == "running"
    refused = tango("submit", "train", str(tmp_path / "run.yaml"), "--cluster", "local", "--resume", check=False)
    assert refused.returncode == 2 and "is running in" in refused.stderr
    tango("stop", str(directory.path))
    wait_until(lambda: run_state(directory, {}).state == "stopped")
    steps = counted(directory)
    counting_config(tmp_path, "run", {"nodes": 1, "tasks_per_node": 2}, steps=steps + 1)
    tango("submit", "train", str(tmp_path / "run.yaml"), "--cluster", "debug", "--resume", env=PROFILE.env)
    assert counted(directory) == steps + 1
    from rich.console import Console

    show_logs(directory.path, Console(), rank=None, lines=5, follow=True)
    shown = capsys.readouterr().out
    assert "attempt 1, train" in shown and "stopped after" in shown and "attempt 2" in shown


def test_a_sweep_here_goes_on_after_a_cell_that_fails_and_says_so(tmp_path: Path) -> None:
    counting_config(tmp_path, "base", {"nodes": 1, "tasks_per_node": 1})
    varied = [{"train.questions_per_step": count} for count in (4, 8)]
    tree = {"config": "base.yaml", "dir": str(tmp_path / "out"), "cells": varied}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    cells = load_sweep(tmp_path / "sweep.yaml").cells
    for cell in cells:
        run = cell.directory.path
        run.parent.mkdir(parents=True, exist_ok=True)
        behaviour = {"steps": 2, "rank": 0, "step": 1, "action": "fail" if cell.index == 0 else "no"}
        run.with_name(f"{run.name}.behaviour.json").write_text(json.dumps(behaviour))
    done = tango("sweep", str(tmp_path / "sweep.yaml"), "--cluster", "debug", check=False, env=PROFILE.env)
    assert done.returncode == 1 and "1 of 2 cells failed: questions_per_step=4, seed 0" in done.stdout
    assert [run_state(cell.directory, {}).state for cell in cells] == ["failed", "done"]
