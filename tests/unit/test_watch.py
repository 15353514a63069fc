"""Who hangs, who failed first and who asked for a stop, from files of the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.control.outcome import Outcome, find_cause, read_failures, write_outcome
from tango_hpc.control.stop import StopRequest, read_stop_request, request_stop
from tango_hpc.control.watchdog import Watchdog
from tango_hpc.launch.starters import death, deaths_in_srun_output
from tango_hpc.run.directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.outcomes.mkdir()
    run.heartbeats.mkdir()
    run.logs.mkdir()
    return run


def beat(directory: RunDirectory, rank: int, progress: int, phase: str = "rollout", **more: Any) -> None:
    values = {"host": f"n{rank}", "pid": 10 + rank, "phase": phase, "progress": progress, "reached_safe_point": True}
    directory.heartbeat_file(rank).write_text(json.dumps(values | more))


def fail(directory: RunDirectory, rank: int, time: float, error: str, *, echo: bool = False) -> None:
    traceback = f"Traceback\n{error}\n"
    outcome = Outcome(rank, error, host=f"n{rank}", phase="train", traceback=traceback, echo=echo, time=time)
    write_outcome(directory, outcome)


def test_no_hang_while_every_rank_advances(directory: RunDirectory) -> None:
    dog = Watchdog(directory, 2, timeout_seconds=10)
    for second in range(0, 60, 5):
        beat(directory, 0, second)
        beat(directory, 1, second)
        assert dog.look(now=second) is None


def test_a_rank_that_never_starts_is_named(directory: RunDirectory) -> None:
    dog = Watchdog(directory, 2, timeout_seconds=10)
    beat(directory, 0, 1)
    assert dog.look(now=0) is None
    for second in range(0, 600, 5):
        beat(directory, 0, second)
        assert dog.look(now=second) is None
    beat(directory, 0, 601)
    found = dog.look(now=601)
    assert found is not None and found.rank == 1 and found.phase == "starting"


def test_the_rank_that_does_not_wait_for_its_peers_is_blamed(directory: RunDirectory) -> None:
    dog = Watchdog(directory, 3, timeout_seconds=10)
    for rank in range(3):
        beat(directory, rank, 7, stack=f"stack of {rank}", waits_for_peers=rank != 2)
    assert dog.look(now=0) is None
    found = dog.look(now=11)
    assert found is not None and found.rank == 2
    assert found.title() == (
        "rank 2 on n2 failed in phase 'rollout': hangs: no progress for 11 s (limit launch.hang_timeout_seconds)"
    )
    assert "stack of 2" in found.traceback
    assert "rank 0: 'rollout' for 11 s (waits for its peers)" in found.traceback


def test_a_stopped_process_is_told_from_a_busy_one(directory: RunDirectory) -> None:
    dog = Watchdog(directory, 1, timeout_seconds=10)
    beat(directory, 0, 3)  # no stack: its heartbeat stopped as well
    dog.look(now=0)
    found = dog.look(now=11)
    assert found is not None and "its process no longer answers" in found.error


def test_a_rank_that_has_ended_does_not_hang(directory: RunDirectory) -> None:
    dog = Watchdog(directory, 1, timeout_seconds=10)
    beat(directory, 0, 3)
    write_outcome(directory, Outcome(0, code=0))
    dog.look(now=0)
    assert dog.look(now=100) is None


def test_echoes_come_after_the_cause_even_when_they_are_older(directory: RunDirectory) -> None:
    fail(directory, 0, 1.0, "RuntimeError: Connection closed by peer", echo=True)
    fail(directory, 3, 2.0, "ValueError: late")
    fail(directory, 2, 1.5, "ValueError: first")
    assert [failure.rank for failure in read_failures(directory)] == [2, 3, 0]


def test_a_silent_death_comes_before_its_echoes(directory: RunDirectory) -> None:
    beat(directory, 1, 5, "train")
    fail(directory, 0, 1.0, "RuntimeError: Connection closed by peer", echo=True)
    causes = find_cause(directory, [death(directory, 0, 1), death(directory, 1, -9)])
    assert [cause.rank for cause in causes] == [1, 0]
    assert causes[0].title().startswith("rank 1 on n1 failed in phase 'train': killed by SIGKILL (out of memory?")


def test_who_asked_for_a_stop(directory: RunDirectory) -> None:
    directory.control.mkdir()
    assert read_stop_request(directory) is None
    near, wish = StopRequest("supervisor", "the time limit is near"), StopRequest("user", "tango stop by me")
    for request, heard in ((near, near), (wish, wish), (near, wish)):
        request_stop(directory, request)
        assert read_stop_request(directory) == heard
    for by_hand in ("", "enough", "1"):
        directory.stop_file.write_text(by_hand)
        request_by_hand = read_stop_request(directory)
        assert request_by_hand is not None and request_by_hand.by == "user"


def test_srun_output(directory: RunDirectory) -> None:
    beat(directory, 3, 5, "verify")
    text = (
        "srun: error: n2: task 3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=12.0\n"
        "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
    )
    deaths = deaths_in_srun_output(directory, text)
    assert [(end.rank, end.host, end.phase) for end in deaths] == [(3, "n2", "verify"), (0, "n1", "starting")]
    assert deaths[0].error.startswith("killed by SIGKILL")
