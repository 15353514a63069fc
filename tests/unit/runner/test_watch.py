"""Who hangs, who failed first and who asked for a stop, from files of the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config.schema import LaunchConfig
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner import heartbeat
from tango_hpc.runner.outcome import Outcome, find_cause, outcome_of_dead, read_failures, read_outcomes, write_outcome
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.starters import deaths_in_srun_output
from tango_hpc.runner.stop import StopRequest, read_stop_request, request_stop
from tango_hpc.runner.watchdog import Watchdog


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.outcomes.mkdir()
    run.heartbeats.mkdir()
    run.logs.mkdir()
    return run


G, V = "generator", "verifier"


def workers(num_ranks: int, *roles: str) -> list[Worker]:
    return [Worker(rank, role) for rank in range(num_ranks) for role in roles or (G,)]


def beat(directory: RunDirectory, rank: int, progress: int, phase: str = "rollout", role: str = G, **more: Any) -> None:
    values = {"host": f"n{rank}", "pid": 10 + rank, "phase": phase, "progress": progress, "reached_safe_point": True}
    directory.heartbeat_file(Worker(rank, role)).write_text(json.dumps(values | more))


def fail(directory: RunDirectory, rank: int, time: float, error: str, *, role: str = G, echo: bool = False) -> None:
    traceback = f"Traceback\n{error}\n"
    outcome = Outcome(rank, role, error, host=f"n{rank}", phase="train", traceback=traceback, echo=echo, time=time)
    write_outcome(directory, outcome)


def test_no_hang_while_every_rank_advances(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(2), 10, loading_seconds=600)
    for second in range(0, 60, 5):
        beat(directory, 0, second)
        beat(directory, 1, second)
        assert dog.look(now=second) is None


def test_a_rank_that_never_starts_is_named(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(2), 10, loading_seconds=600)
    beat(directory, 0, 1)
    assert dog.look(now=0) is None
    for second in range(0, 600, 5):
        beat(directory, 0, second)
        assert dog.look(now=second) is None
    beat(directory, 0, 601)
    found = dog.look(now=601)
    assert found is not None and found.rank == 1 and found.phase == "starting"
    assert found.error.endswith("(limit launch.loading_timeout_seconds)")


def test_how_long_loading_may_take_is_a_setting() -> None:
    assert LaunchConfig(hang_timeout_seconds=30).loading_limit_seconds == 600
    assert LaunchConfig(hang_timeout_seconds=900).loading_limit_seconds == 900
    assert LaunchConfig(hang_timeout_seconds=900, loading_timeout_seconds=45).loading_limit_seconds == 45


def test_the_rank_that_does_not_wait_for_its_peers_is_blamed(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(3), 10, loading_seconds=600)
    for second in (0, 11):
        for rank in range(3):
            beat(directory, rank, 7, stack=f"stack of {rank}", waits_for_peers=rank != 2, number=second)
        found = dog.look(now=second)
        assert second or found is None
    assert found is not None and found.rank == 2
    assert (
        found.title() == "rank 2 (generator) on n2 failed in phase 'rollout': hangs: no progress for 11 s (limit"
        " launch.hang_timeout_seconds)"
    )
    assert "stack of 2" in found.traceback
    assert "rank 0 (generator): 'rollout' for 11 s (waits for its peers)" in found.traceback


def test_a_stopped_process_is_told_from_a_busy_one(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(1), 10, loading_seconds=600)
    beat(directory, 0, 3)  # no stack: its heartbeat stopped as well
    dog.look(now=0)
    found = dog.look(now=11)
    assert found is not None and "its process no longer answers" in found.error


def test_a_rank_that_has_ended_does_not_hang(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(1), 10, loading_seconds=600)
    beat(directory, 0, 3)
    write_outcome(directory, Outcome(0, G, code=0))
    dog.look(now=0)
    assert dog.look(now=100) is None


def test_echoes_come_after_the_cause_even_when_they_are_older(directory: RunDirectory) -> None:
    fail(directory, 0, 1.0, "RuntimeError: Connection closed by peer", echo=True)
    fail(directory, 3, 2.0, "ValueError: late")
    fail(directory, 2, 1.5, "ValueError: first")
    assert [failure.rank for failure in read_failures(directory)] == [2, 3, 0]


def test_outcomes_are_the_files_that_the_docs_describe(directory: RunDirectory) -> None:
    """Their names, keys and values stand here as in docs/run_directory.md, so that a rename breaks no run of before."""
    files = {
        "rank_00001.generator.json": (
            """{"rank": 1, "role": "generator", "error": "ValueError: late", "code": 1,
            "host": "n1", "phase": "train", "traceback": "Traceback\\nValueError: late\\n", "echo": false, "time": 2.5}"""
        ),
        "rank_00000.verifier.json": (
            """{"rank": 0, "role": "verifier", "error": "RuntimeError: Connection closed by peer",
            "code": 1, "host": "n0", "phase": "verify", "traceback": "", "echo": true, "time": 1.5}"""
        ),
        "rank_00000.generator.json": (
            """{"rank": 0, "role": "generator", "error": "", "code": 85, "host": "n0",
            "phase": "rollout", "traceback": "", "echo": false, "time": 3.0}"""
        ),
        "rank_00002.json": (
            """{"rank": 2, "role": "", "error": "ImportError: no", "code": 1, "host": "n2",
            "phase": "loading libraries", "traceback": "", "echo": false, "time": 3.5}"""
        ),
    }
    for name, text in files.items():
        (directory.outcomes / name).write_text(text)
    late = Outcome(1, G, "ValueError: late", 1, "n1", "train", "Traceback\nValueError: late\n", False, 2.5)
    echo = Outcome(0, V, "RuntimeError: Connection closed by peer", 1, "n0", "verify", "", True, 1.5)
    loading = Outcome(2, "", "ImportError: no", 1, "n2", "loading libraries", "", False, 3.5)
    stopped = Outcome(0, G, "", 85, "n0", "rollout", "", False, 3.0)
    assert read_failures(directory) == [late, loading, echo]
    assert read_outcomes(directory) == {outcome.worker: outcome for outcome in (late, echo, loading, stopped)}
    for outcome in (late, echo, loading, stopped):
        write_outcome(directory, outcome)
    written = {file.name: json.loads(file.read_text()) for file in directory.outcomes.iterdir()}
    assert written == {name: json.loads(text) for name, text in files.items()}


def test_a_silent_death_comes_before_its_echoes(directory: RunDirectory) -> None:
    beat(directory, 1, 5, "train")
    fail(directory, 0, 1.0, "RuntimeError: Connection closed by peer", echo=True)
    write_outcome(directory, outcome_of_dead(directory, Worker(1, G), -9))
    causes = find_cause(directory, [])
    assert [cause.rank for cause in causes] == [1, 0]
    told = "rank 1 (generator) on n1 failed in phase 'train': killed by SIGKILL (out of memory?"
    assert causes[0].title().startswith(told)


def test_a_whole_rank_that_dies_comes_before_the_echoes_of_its_end(directory: RunDirectory) -> None:
    fail(directory, 0, 1.0, "RuntimeError: Connection closed by peer", echo=True)
    beat(directory, 1, 5, "rollout")
    beat(directory, 1, 5, "loading", V)
    causes = find_cause(directory, [Outcome(0, error="exit code 1"), Outcome(1, error="killed by SIGKILL")])
    told = "rank 1 failed in phase 'rollout (generator), loading (verifier)': killed by SIGKILL"
    assert [cause.title() for cause in causes[:1]] == [told]
    assert [cause.rank for cause in causes] == [1, 0]


def test_a_crash_tells_its_stacks(directory: RunDirectory) -> None:
    beat(directory, 1, 5, "verify", V)
    directory.crash_file(Worker(1, V)).write_text("Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File x")
    outcome = outcome_of_dead(directory, Worker(1, V), -11)
    told = "rank 1 (verifier) on n1 failed in phase 'verify': Fatal Python error: Segmentation fault"
    assert outcome.title() == told and "Thread 0x1" in outcome.traceback


def test_of_two_roles_the_one_that_works_is_blamed(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(2, G, V), 10, loading_seconds=600)
    for rank in range(2):
        beat(directory, rank, 7, stack="asleep", waits_for_peers=True)
        beat(directory, rank, 9, role=V, stack="at work", waits_for_peers=rank == 0)
    assert dog.look(now=0) is None
    found = dog.look(now=11)
    assert found is not None and found.worker == Worker(1, V)
    assert "rank 1 (generator): 'rollout' for 11 s (waits for its peers)" in found.traceback


def test_who_waits_for_one_that_advances_does_not_hang(directory: RunDirectory) -> None:
    """A verifier, and a rank that has written its share, wait for a rank that writes longer than the limit."""
    dog = Watchdog(directory, workers(2, G, V), 10, loading_seconds=600)
    for second in range(0, 60, 5):
        write_for(directory, second)
        assert dog.look(now=second) is None
    found = dog.look(now=66)  # it has not advanced since second 55
    assert found is not None and found.worker == Worker(1, G)


@pytest.mark.parametrize("trouble", ["no longer answers", "on its GPU"])
def test_who_does_not_wait_is_found_while_others_advance(directory: RunDirectory, trouble: str) -> None:
    """A stopped process whose last heartbeat stood in a collective, and one that waits for its own GPU."""
    dog = Watchdog(directory, workers(2, G, V), 10, loading_seconds=600)
    for second in range(0, 15, 5):
        assert dog.look(now=second) is None
        write_for(directory, second)
        more = {"number": 3} if trouble == "no longer answers" else {"in_collective": False}
        beat(directory, 0, 7, role=V, **(waiting(second) | more))
    found = dog.look(now=16)
    assert found is not None and found.worker == Worker(0, V)


def test_responses_do_not_decide_who_got_least_far(directory: RunDirectory) -> None:
    """Rank 0 has written more of them, and is one phase behind."""
    heart = heartbeat.Heart(directory, Worker(0, G))
    ahead = heartbeat.Heart(directory, Worker(1, G))
    for done in range(33):
        heart.advance(f"{done} of 33 responses of rank 0")
    for phase in ("rollout", "train"):
        ahead.enter(phase)
    heart.enter("rollout")
    for rank, progress in ((0, heart._progress), (1, ahead._progress)):
        beat(directory, rank, progress, stack="in the GPU", waits_for_peers=True)
    dog = Watchdog(directory, workers(2), 10, loading_seconds=600)
    assert dog.look(now=0) is None
    found = dog.look(now=11)
    assert found is not None and found.rank == 0


def waiting(second: int) -> dict[str, Any]:
    """What the heartbeat of a process that waits for others says."""
    return {"stack": "asleep", "in_collective": True, "waits_for_peers": True, "number": second}


def write_for(directory: RunDirectory, second: int) -> None:
    """The heartbeats while one of two ranks writes."""
    for worker in (Worker(0, G), Worker(0, V), Worker(1, V)):
        beat(directory, worker.rank, 7, role=worker.role, **waiting(second))
    beat(directory, 1, 7, part=f"{second} of 64 responses of rank 1", number=second)


def test_who_waits_for_peers_that_have_ended_hangs(directory: RunDirectory) -> None:
    dog = Watchdog(directory, workers(2), 10, loading_seconds=600)
    write_outcome(directory, Outcome(1, G, code=0))
    beat(directory, 0, 7, stack="asleep", waits_for_peers=True)
    assert dog.look(now=0) is None
    found = dog.look(now=11)
    assert found is not None and found.worker == Worker(0, G)


def test_a_part_of_a_phase_is_told_while_it_lasts(directory: RunDirectory) -> None:
    heart = heartbeat.Heart(directory, Worker(0, V))
    heart.enter("verify")
    before = heart._progress
    heart.advance("35 of 160 responses")
    heart._write()
    assert heartbeat.read_beat(directory, Worker(0, V)).progress == before  # others that are as far count no responses
    assert heartbeat.part_under_way(directory, "verify") == "35 of 160 responses"
    assert heartbeat.part_under_way(directory, "train") == ""  # what progress.json says by now
    heart.enter("train")
    heart._write()
    assert heartbeat.part_under_way(directory, "train") == ""


@pytest.mark.parametrize("busy", [True, False])
def test_who_stands_before_a_busy_gpu_waits_for_its_peers(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """With NCCL nobody stands in a collective: the GPU does, and who asks it for a number."""
    worker = Worker(0, G)
    heart = heartbeat.Heart(directory, worker)
    heart.gpu_is_busy = lambda: busy
    heart._write()
    assert not heartbeat.read_beat(directory, worker).waits_for_peers  # it has only just advanced
    monkeypatch.setattr(heartbeat, "STALL_SECONDS", -1.0)
    heart._write()
    found = heartbeat.read_beat(directory, worker)
    assert found.waits_for_peers == busy and "heart._write()" in found.stack


def test_a_gpu_is_asked_from_another_thread_only_once_its_engine_is_there(directory: RunDirectory) -> None:
    """A question while CUDA graphs are captured would invalidate them."""
    process = RankProcess(directory, Worker(0, G), reads_file=True)
    process.stop.agree = lambda flag: flag
    asked: list[str] = []
    process.watch_stream = lambda: lambda: asked.append("the stream") is None
    process.heart.enter("loading the generator")
    assert not process.heart.gpu_is_busy() and not asked
    process.has_loaded()
    assert process.heart.gpu_is_busy() and asked
    process.watch_stream = lambda: lambda: False  # of another stream, which the thread has now
    process.check("between steps")
    assert not process.heart.gpu_is_busy()


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


def test_srun_output() -> None:
    text = (
        "srun: error: n2: task 3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=12.0\n"
        "srun: error: n1: tasks 0-1: Exited with exit code 1\n"
    )
    deaths = deaths_in_srun_output(text)
    assert [(end.worker, end.host) for end in deaths] == [(Worker(3), "n2"), (Worker(0), "n1")]
    assert deaths[0].error.startswith("killed by SIGKILL")
