"""What a job does after an attempt that did not come to its end: is it tried again, by whom, and what is said."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.status import states
from tango_hpc.runner import job, slurm
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.job import run_attempt, run_programs
from tango_hpc.runner.requeue import requeue
from tango_hpc.runner.stop import StopRequest, read_stop_request, request_stop
from tango_hpc.runner.supervisor import ENDED_WHILE_LOADING
from tango_hpc.stages.stage import TRAIN
from tests.helpers.fake_slurm import GONE, FakeSlurm, described, said, submitted_run
from tests.slurm.jobs import counting_config


class Requeueing:
    """What `requeue` says and does while Slurm changes its mind."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.told: list[str] = []
        self.waits = 0
        self.then: Callable[[int], None] = lambda count: None

    def run(self, seconds_left: float | None = 100) -> bool:
        def wait(seconds: float) -> None:
            assert seconds <= 5
            self.waits += 1
            self.then(self.waits)

        return requeue("7", self.directory, seconds_left, say=self.told.append, wait=wait, command="tango go on")


def test_a_requeue_is_tried_until_slurm_answers(fake: FakeSlurm, tmp_path: Path) -> None:
    trying = Requeueing(submitted_run(tmp_path))
    answers = f'[ "$1" = requeue ] || echo {described("7")!r}'

    def come_back(count: int) -> None:
        if count == 2:  # the controller answers, but the requeue itself fails, as 22.05 does in the midst of a restart
            fake.runs(
                "scontrol",
                f'[ "$1" = requeue ] && {{ echo "Unexpected message received for job 7"; exit 1; }}; {answers}',
            )
        if count == 3:
            fake.runs("scontrol", answers)

    trying.then = come_back
    assert trying.run() and trying.waits == 3
    assert fake.calls()[-1] == "scontrol requeue 7"
    assert trying.told[0].startswith("Not requeued yet: Slurm did not answer: slurm_load_jobs error: Unable to contact")
    assert trying.told[0].endswith("Should job 7 not come back, continue with: tango go on")


def test_a_requeue_that_cannot_be_is_given_up(fake: FakeSlurm, tmp_path: Path) -> None:
    trying = Requeueing(submitted_run(tmp_path))
    assert not trying.run(seconds_left=0)  # the job is killed any moment
    assert trying.told[-1].startswith("Not requeued: Slurm did not answer")
    refused = '[ "$1" = requeue ] && { echo "Access/permission denied" >&2; exit 1; }'
    fake.runs("scontrol", f"{refused}; echo {described('7')!r}")
    assert not trying.run() and "Access/permission denied" in trying.told[-1] and trying.waits < 10
    fake.says("scontrol", described("7", Requeue="0"))
    assert not trying.run() and trying.told[-1] == "Not requeued: job 7 was not submitted with --requeue."
    fake.says("scontrol", described("7", "CANCELLED"))
    assert not trying.run() and trying.told[-1] == "Not requeued: job 7 is CANCELLED."
    fake.fails("scontrol")
    trying.then = lambda count: request_stop(trying.directory, StopRequest("user", "tango stop by me"))
    assert not trying.run() and trying.told[-1] == "Not requeued: tango stop by me."


def test_a_job_that_never_got_past_loading_says_what_to_raise(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1, "max_attempts_without_progress": 2})
    directory = prepare_run([TRAIN], config, resume=False)
    batch = {"SLURM_JOB_ID": "7", slurm.BATCH_MARK: f"7:{os.getpid()}", "SLURM_RESTART_COUNT": "2"}
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    log = AttemptLog(directory)
    for _ in range(2):
        attempt = log.start(TRAIN)
        attempt.started -= 500
        log.end(attempt, 85, "the time limit is near: ended while loading, there was nothing to save")
    told = said(lambda console: print(run_attempt(directory, TRAIN, config, console)))
    given_up = "given up: 2 attempts of job 7 in a row never got past loading, the longest in "
    assert told.startswith(given_up) and "ask for more time (time in the profile, --time of sbatch)" in told
    assert log.read()[-1].code == 1 and states([directory])[0].state == "unknown"
    fake.says("squeue", "")
    assert states([directory])[0].detail.startswith(given_up)


def test_a_stop_that_comes_before_the_first_attempt_counts(fake: FakeSlurm, tmp_path: Path) -> None:
    """While the job loads modules and imports, say; and between two stages."""
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = RunDirectory(config.run.dir)
    directory.control.mkdir(parents=True)
    request_stop(directory, StopRequest("user", "of another time"))
    prepare_run([TRAIN], config, resume=False)
    assert read_stop_request(directory) is None, "whoever starts a run wants it to run"
    request_stop(directory, StopRequest("user", "tango stop by me"))
    told = said(lambda console: print(run_programs(directory, [TRAIN, TRAIN], console)))
    assert told.count("tango stop by me: not started. Continue with: ") == 1
    state = states([directory])[0]
    assert (state.state, state.detail) == ("stopped", "tango stop by me")


def test_a_stop_that_comes_while_a_failure_is_cleared_away_counts(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(slurm.BATCH_MARK, f"7:{os.getpid()}")

    def fail() -> int:
        request_stop(directory, StopRequest("user", "tango stop by me"))
        return 1

    failed = SimpleNamespace(run=fail, reason="", request=None, stopped_by_user=False, was_suspended=True)
    monkeypatch.setattr(job, "Supervisor", lambda *_, **__: failed)
    monkeypatch.setattr(job, "requeue", lambda *_, **__: pytest.fail("it was requeued"))
    assert run_attempt(directory, TRAIN, config, Console(file=io.StringIO())) == 1
    assert read_stop_request(directory) == StopRequest("user", "tango stop by me")


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_saved_after_all_is_not_denied(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """The ranks may come to a safe point just after the supervisor has taken them to be loading."""

    class TakenForLoading:
        reason = f"the time limit is near: {ENDED_WHILE_LOADING}"
        stopped_by_user, was_suspended, request = False, False, StopRequest("job", "the time limit is near")

        def __init__(self, directory: RunDirectory, *_: object, **__: object) -> None:
            self.directory = directory

        def run(self) -> int:
            if saved:
                folder = self.directory.checkpoints / "train" / "step_000000+rollout"
                folder.mkdir(parents=True)
                (folder / "state.json").write_text("{}")
            return 85

    monkeypatch.setattr(job, "Supervisor", TakenForLoading)
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    said(lambda console: print(run_attempt(directory, TRAIN, config, console)))
    (attempt,) = AttemptLog(directory).read()
    assert attempt.saved_after == ("step_000000+rollout" if saved else None)
    assert attempt.reason == ("the time limit is near" if saved else TakenForLoading.reason)


@pytest.mark.parametrize(
    ("suspended", "ours", "tried_again"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_what_fails_after_a_suspension_is_tried_again(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suspended: bool, ours: bool, tried_again: bool
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(slurm.BATCH_MARK, f"7:{os.getpid() if ours else 1}")
    failed = SimpleNamespace(
        run=lambda: 1, reason="a collective took too long", request=None, stopped_by_user=False, was_suspended=suspended
    )
    monkeypatch.setattr(job, "Supervisor", lambda *_, **__: failed)
    requeued: list[str] = []
    monkeypatch.setattr(job, "requeue", lambda number, *_, **__: requeued.append(number))
    console = Console(record=True, width=400, file=io.StringIO())
    assert run_attempt(directory, TRAIN, config, console) == 1
    assert requeued == (["7"] if tried_again else [])
    told = {True: "Not requeued: job 7 is not this run's own", False: "Not tried again: this attempt made no progress."}
    assert tried_again or told[not ours] in console.export_text()


@pytest.mark.parametrize(
    ("code", "restarts", "attempts"), [(75, 0, [0]), (1, 1, [0]), (78, 1, [0]), (75, 1, [1, 1, 0])]
)
def test_a_node_that_fails_ends_no_run_that_started_elsewhere_before(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, restarts: int, attempts: list[int]
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1, "max_attempts_without_progress": 2})
    directory = prepare_run([TRAIN], config, resume=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setenv(slurm.BATCH_MARK, f"7:{os.getpid()}")
    failed = SimpleNamespace(
        run=lambda: code, reason="this rank has no GPU", request=None, stopped_by_user=False, was_suspended=False
    )
    monkeypatch.setattr(job, "Supervisor", lambda *_, **__: failed)
    requeued: list[str] = []
    monkeypatch.setattr(job, "requeue", lambda number, *_, **__: requeued.append(number))
    for again in attempts:  # two without progress are all that is borne with
        ended = run_attempt(directory, TRAIN, config, Console(file=io.StringIO()))
        assert (len(requeued), ended) == (again, code if again or len(attempts) == 1 else 1)
        requeued.clear()


def test_a_batch_job_waits_for_slurm_where_it_cannot_know_who_runs(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    directory.lock_file.write_text(json.dumps({"host": "n9", "pid": 1, "job": "6"}))
    with pytest.raises(slurm.NoAnswer):
        run_attempt(directory, TRAIN, config, Console(file=io.StringIO()))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(slurm.BATCH_MARK, f"7:{os.getpid()}")
    done = SimpleNamespace(run=lambda: 0, reason="", request=None, stopped_by_user=False)
    monkeypatch.setattr(job, "Supervisor", lambda *_, **__: done)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: fake.fails("scontrol", GONE))
    monkeypatch.setattr(slurm, "time", clock)
    assert run_attempt(directory, TRAIN, config, Console(file=io.StringIO())) == 0
