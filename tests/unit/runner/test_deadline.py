"""Times of one clock: the end of a job, a process that is put to sleep, heartbeats of other nodes."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import update_summary
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.status import run_state
from tango_hpc.runner import deadline, supervisor, watchdog
from tango_hpc.runner.deadline import AwakeClock, Deadline
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.heartbeat import Beat, write_beat
from tango_hpc.runner.outcome import Outcome, write_outcome
from tango_hpc.runner.slurm import NoAnswer
from tango_hpc.runner.supervisor import Supervisor
from tango_hpc.stages.stage import TRAIN
from tests.helpers.runs import unseen
from tests.slurm.jobs import counting_config


class Slurm:
    """A clock of this process, and a controller that knows of an end: `end` by that clock, None for no limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = 5000.0, 0
        self.end: float | None = None
        self.silent = False
        monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: self.now))

    def left(self) -> float | None:
        self.asked += 1
        if self.silent:
            raise NoAnswer("down")
        return None if self.end is None else self.end - self.now

    def poll(self, watched: Deadline, seconds: int) -> float | None:
        """Look every 0.2 s for so many seconds; when it first said that fewer than 60 are left."""
        until = self.now + seconds
        while self.now < until:
            if watched.is_near(60):
                return self.now
            self.now += 0.2
        return None


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


def test_what_slurm_refuses_to_tell_ends_nothing(slurm: Slurm) -> None:
    """Its commands are not there in a container, say, or one of two questions fails."""

    def ask() -> float:
        raise UserError("the command scontrol was not found")

    assert slurm.poll(Deadline(ask), 3600) is None


def test_the_end_comes_when_slurm_says_so(slurm: Slurm) -> None:
    slurm.end = slurm.now + 3600
    assert slurm.poll(Deadline(slurm.left), 4000) == pytest.approx(5000 + 3540, abs=0.5)
    assert slurm.asked < 10


def test_a_limit_that_was_extended_is_noticed(slurm: Slurm) -> None:
    slurm.end = slurm.now + 600
    watched = Deadline(slurm.left)
    assert slurm.poll(watched, 300) is None
    slurm.end += 900
    assert slurm.poll(watched, 2000) == pytest.approx(5000 + 1440, abs=0.5)


def test_a_limit_that_was_shortened_is_noticed_in_ten_minutes(slurm: Slurm) -> None:
    slurm.end = slurm.now + 86400
    watched = Deadline(slurm.left)
    assert slurm.poll(watched, 60) is None
    slurm.end = slurm.now + 1200
    assert slurm.poll(watched, 2000) == pytest.approx(5000 + 60 + 1140, abs=0.5)


def test_in_an_outage_what_was_known_holds(slurm: Slurm) -> None:
    slurm.end = slurm.now + 600
    watched = Deadline(slurm.left)
    assert slurm.poll(watched, 10) is None
    slurm.silent = True
    assert slurm.poll(watched, 1000) == pytest.approx(5000 + 540, abs=0.5)


def test_an_end_that_nobody_knew_is_not_near(slurm: Slurm) -> None:
    slurm.silent = True
    watched = Deadline(slurm.left)
    assert slurm.poll(watched, 100) is None and slurm.asked <= 2
    slurm.silent, slurm.end = False, slurm.now + 30
    assert slurm.poll(watched, 61) is not None
    slurm.end = None
    assert Deadline(slurm.left).is_near(60) is False


def test_what_a_process_sleeps_through_counts_little(slurm: Slurm) -> None:
    clock = AwakeClock(longest_gap_seconds=10)
    for _ in range(100):
        slurm.now += 0.2
        clock.now()
    assert clock.now() == pytest.approx(20) and clock.longest_pause < 1
    slurm.now += 3600
    assert clock.now() == pytest.approx(30) and clock.longest_pause == pytest.approx(3600)


class Ranks:
    """A rank that does nothing by itself: a starter for a supervisor whose time a test makes."""

    def __init__(self) -> None:
        self.alive = True

    def start(self) -> None:
        pass

    def running(self) -> bool:
        return self.alive

    def deaths(self) -> list[Outcome]:
        return []

    def kill(self) -> None:
        self.alive = False


@pytest.mark.parametrize(("at_once", "code"), [(3600.0, 0), (0.0, 1)])
def test_what_a_suspended_job_sleeps_through_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: float, code: int
) -> None:
    """An hour of suspension, beside an hour in which the supervisor looks and nothing moves."""
    config = counting_config(tmp_path, "run", {"nodes": 1, "hang_timeout_seconds": 60, "grace_seconds": 10})
    directory = prepare_run([TRAIN], config, resume=False)
    worker, now, ranks = Worker(0, "generator"), 5000.0, Ranks()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 5020 and now < 5020 + 3600:
            now += at_once  # between two looks of the supervisor, whose node sleeps too
        if now > 5040 + 3600:  # the rank comes back some time after that
            write_beat(directory, worker, Beat(pid=1, progress=2, reached_safe_point=True))
        if now > 5050 + 3600:
            write_outcome(directory, Outcome(*worker, code=0))
            ranks.alive = False

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep, time=lambda: now)
    for module in (supervisor, deadline, watchdog):
        monkeypatch.setattr(module, "time", clock, raising=False)
    watching = Supervisor(directory, config, ["generator"], ranks, Console(file=io.StringIO(), width=200), unseen)
    begin = ranks.start
    monkeypatch.setattr(
        ranks,
        "start",
        lambda: (begin(), write_beat(directory, worker, Beat(pid=1, progress=1, reached_safe_point=True))),
    )
    assert watching.run() == code
    assert watching.was_suspended == (code == 0)
    if code:
        assert "hangs: no progress for" in watching.reason


def test_a_clock_that_is_ahead_loses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    directory.heartbeats.mkdir()
    update_summary(directory, "train", "running")  # its ranks were started by hand
    write_beat(directory, Worker(0, "generator"), Beat())
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600)
    assert run_state(directory, {}).state == "running"
    os.utime(directory.heartbeat_file(Worker(0, "generator")), (1e9, 1e9))
    assert run_state(directory, {}).state == "lost"
