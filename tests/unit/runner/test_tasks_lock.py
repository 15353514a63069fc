"""Ranks that were started by hand (`srun tango train`) have no supervisor: the task of rank 0 holds the run's lock."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tango_hpc.base.errors import CheckFailed, UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner import lock, workers
from tango_hpc.runner.guard import SUPERVISED
from tango_hpc.runner.lock import Process, RunLock, is_held
from tango_hpc.runner.outcome import read_outcomes
from tango_hpc.runner.workers import Body, host_ranks


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    made = RunDirectory(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(workers, "prepare_rank", lambda directory: {})
    monkeypatch.setattr(workers, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    return made


@pytest.mark.parametrize(("rank", "supervised", "holds"), [("0", False, True), ("1", False, False), ("0", True, False)])
def test_the_task_of_rank_0_has_the_run_while_it_lasts(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, rank: str, supervised: bool, holds: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    if supervised:
        monkeypatch.setenv(SUPERVISED, "srun")
    seen: list[bool] = []

    def prepare() -> tuple[list[str], Body]:
        seen.append(is_held(directory))
        raise ValueError("enough")

    assert host_ranks(directory, prepare) == (0 if supervised else 1)
    assert seen == [holds] and not is_held(directory)


def test_who_lost_the_run_while_importing_writes_nothing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.0)

    def prepare() -> tuple[list[str], Body]:
        other = {**asdict(Process.this()), "host": "n2", "id": "of-n2"}
        directory.lock_file.write_text(json.dumps(other))
        return ["generator"], lambda worker, stop: pytest.fail("it began")

    with pytest.raises(CheckFailed, match="on n2 has taken over"):
        host_ranks(directory, prepare)
    assert read_outcomes(directory) == {}
    assert json.loads(directory.lock_file.read_text())["id"] == "of-n2"


def test_a_run_that_somebody_has_is_left_alone(directory: RunDirectory) -> None:
    directory.control.mkdir()
    with RunLock(directory), pytest.raises(UserError, match="is running in"):
        host_ranks(directory, lambda: pytest.fail("it began"))
    assert read_outcomes(directory) == {}, "it would end the run of the other"
