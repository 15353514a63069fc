"""`tango submit --cluster local`: the same job in the background of this machine, with counting ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc import submit
from tango_hpc.launch.status import run_state, show_logs
from tango_hpc.run.directory import RunDirectory
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
    assert f"{directory.snapshot}/tango_hpc" in directory.rank_log(1).read_text()
    assert run_state(directory, {}).state == "done"


def test_stop_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1, "tasks_per_node": 2}, steps=4000, step_seconds=0.05)
    submit("train", config, profile=PROFILE, cluster="local")
    directory = RunDirectory(config.run.dir)
    wait_until(lambda: directory.rank_log(0).exists() and "step 2\n" in directory.rank_log(0).read_text())
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
