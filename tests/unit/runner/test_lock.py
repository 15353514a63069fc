"""Who has a run: one of many, whoever died before; and nobody is taken for the holder who is not."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tango_hpc.base.errors import CheckFailed, UserError
from tango_hpc.base.files import read_json
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.ending import cancel, stop
from tango_hpc.commands.status import run_state
from tango_hpc.commands.status_table import show_status
from tango_hpc.runner import lock as locking
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import (
    AttemptLog,
    chain_before,
    forget_job,
    known_jobs,
    remember_job,
    submitted_jobs,
    submitted_process,
)
from tango_hpc.runner.lock import Holder, Process, RunLock, check_lock, is_held
from tango_hpc.runner.requeue import resume_command
from tango_hpc.stages.stage import TRAIN

STARTERS = 25


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(locking, "WATCH_SECONDS", 0.6)
    monkeypatch.setattr(locking, "POLL_SECONDS", 0.05)
    made = RunDirectory(tmp_path)
    made.control.mkdir()
    made.config.write_text("seed: 0\n")
    return made


def dead_process() -> Process:
    """One of this boot that has ended."""
    gone = subprocess.Popen(["sleep", "60"])
    known = Process.of(gone.pid)
    assert known is not None and known.is_alive
    gone.kill()
    gone.wait()
    assert not known.is_alive
    return known


def leave_lock(directory: RunDirectory, process: Process, file: Path | None = None, **changes: object) -> Holder:
    holder = Holder(**(asdict(process) | {"id": os.urandom(4).hex()} | changes))
    (file or directory.lock_file).write_text(json.dumps(asdict(holder)))
    return holder


def try_to_enter(directory: RunDirectory, barrier, results, done) -> None:  # type: ignore[no-untyped-def]
    taken = RunLock(directory)
    barrier.wait()
    try:
        taken.__enter__()
        results.put("in")
    except UserError as error:
        results.put(str(error))
    done.wait()


@pytest.mark.parametrize("left", ["a stale lock", "a stale lock and a successor that died", "half a lock", "nothing"])
def test_of_many_that_start_at_once_one_gets_in(directory: RunDirectory, left: str) -> None:
    context = multiprocessing.get_context("fork")
    dead = dead_process()
    for _ in range(2):
        if left.startswith("a stale lock"):
            first = leave_lock(directory, dead)
        if left.endswith("that died"):
            leave_lock(directory, dead, directory.control / f"lock.after-{first.id}")
        if left == "half a lock":
            directory.lock_file.write_text('{"host": "')
            os.utime(directory.lock_file, (1, 1))
        barrier, results, done = context.Barrier(STARTERS), context.Queue(), context.Event()
        starters = [
            context.Process(target=try_to_enter, args=(directory, barrier, results, done)) for _ in range(STARTERS)
        ]
        for starter in starters:
            starter.start()
        ends = [results.get(timeout=60) for _ in starters]
        done.set()
        for starter in starters:
            starter.join()
        assert ends.count("in") == 1, ends
        assert all("is running in" in end for end in ends if end != "in")
        left_over = [file.name for file in directory.control.iterdir() if file != directory.lock_file]
        assert left_over == [], "claims and witnesses go"
        directory.lock_file.unlink()


def test_a_process_id_alone_proves_nothing(directory: RunDirectory) -> None:
    """Another process bears the id of the holder: after a reboot, in another container, or by reuse."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        real = Process.of(stranger.pid)
        assert real is not None
        for other in (
            replace(real, start=real.start - 1),
            replace(real, boot="another boot"),
            replace(real, namespace="pid:[1]"),
            replace(real, boot="", namespace="", start=0),  # as earlier versions wrote it
        ):
            leave_lock(directory, other)
            os.utime(directory.lock_file, (1e9, 1e9))
            AttemptLog(directory).start(TRAIN)
            assert not is_held(directory)
            assert run_state(directory, {}).state == "lost"
            console = Console(file=io.StringIO())
            cancel(directory.path, console)
            stop(directory.path, console)
            assert stranger.poll() is None and not directory.stop_file.exists()
            with RunLock(directory):  # and the run starts
                assert is_held(directory)
            assert not directory.lock_file.exists()
        leave_lock(directory, real)
        with pytest.raises(UserError, match=f"process {real.pid} on .* is running in"), RunLock(directory):
            pass
        cancel(directory.path, console)
        assert stranger.wait(timeout=10) == -signal.SIGTERM
    finally:
        stranger.kill()


def test_who_is_not_to_be_seen_is_alive_while_the_lock_is_touched(directory: RunDirectory) -> None:
    elsewhere = replace(Process.this(), boot="another", host="another")
    leave_lock(directory, elsewhere)
    with pytest.raises(UserError, match=r"on another is running in .* try again in 1\d\d s"):
        check_lock(directory)
    os.utime(directory.lock_file, (time.time() - 200,) * 2)
    check_lock(directory)
    # The same machine by its name: it may be another one, or a container beside this one.
    leave_lock(directory, replace(elsewhere, host=Process.this().host))
    toucher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os,sys,time\nwhile 1: time.sleep(.1); os.utime(sys.argv[1])",
            directory.lock_file,
        ]
    )
    try:
        time.sleep(0.5)
        with pytest.raises(UserError, match="is running in"):
            check_lock(directory)
    finally:
        toucher.kill()
        toucher.wait()
    check_lock(directory)


def test_a_slurm_job_is_asked_for(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_lock(directory, replace(Process.this(), boot="another", host="n2"), job="7")
    monkeypatch.setattr(slurm, "is_available", lambda: True)
    state = {"7": "RUNNING"}
    monkeypatch.setattr(slurm, "show_job", lambda job: SimpleNamespace(state=state[job]) if job in state else None)
    with pytest.raises(UserError, match="Slurm job 7 on n2 is running in"):
        check_lock(directory)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # requeued: this is the job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_lock(directory)
    monkeypatch.delenv("SLURM_JOB_ID")
    # Typed into somebody's allocation, which goes on when what was typed is gone.
    leave_lock(directory, replace(Process.this(), boot="another", host="n2"), job="7", own_job=False)
    with pytest.raises(UserError, match=r"on n2 is running in .* if it is gone, try again in \d+ s"):
        check_lock(directory)
    os.utime(directory.lock_file, (1e9, 1e9))
    check_lock(directory)
    state["7"] = "SUSPENDED"
    with pytest.raises(UserError, match="Slurm job 7 on n2 is running in"):
        check_lock(directory)
    state.clear()
    check_lock(directory)


def test_a_holder_keeps_its_lock_and_leaves_that_of_others_alone(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "TOUCH_SECONDS", 0.0)
    with RunLock(directory) as lock:
        for damage in (directory.lock_file.unlink, lambda: directory.lock_file.write_text('{"ho')):
            damage()
            lock.touch()
            assert is_held(directory)
        os.utime(directory.lock_file, (1, 1))
        lock.touch()
        assert directory.lock_file.stat().st_mtime > 1e9
        other = leave_lock(directory, replace(Process.this(), host="n2"))
        with pytest.raises(CheckFailed, match="on n2 has taken over"):
            lock.touch()
    assert Holder.read(directory.lock_file) == other


def test_a_program_keeps_the_lock_of_the_one_that_it_replaces(directory: RunDirectory) -> None:
    program = f"""
import os, sys
from tango_hpc.runner.lock import Holder, RunLock
from tango_hpc.base.run.directory import RunDirectory
directory = RunDirectory({str(directory.path)!r})
lock = RunLock(directory).__enter__()
print(Holder.read(directory.lock_file).id, flush=True)
if len(sys.argv) < 2:
    os.execv(sys.executable, [sys.executable, "-P", "-c", open({str(directory.path / "program.py")!r}).read(), "again"])
lock.release()
"""
    (directory.path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second and not directory.lock_file.exists()


def test_half_a_line_of_the_attempts_costs_that_line(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    log = AttemptLog(directory)
    log.end(log.start(TRAIN), 85, "time")
    lost = log.start(TRAIN)
    content = directory.attempts_file.read_text()
    directory.attempts_file.write_text(content[:-30])  # the crash came in the middle of a line
    log.end(lost, 1, "boom")
    attempt = log.start(TRAIN)
    assert [attempt.number for attempt in log.read()] == [1, 2]
    assert attempt.number == 2, "only the end of the one that was lost is left"
    assert "attempts.jsonl: line 3 is damaged" in capsys.readouterr().err
    assert run_state(directory, {}).attempts == 2


@pytest.mark.parametrize("reason", ["these tensors differ:\n" + "a.b.c\n" * 337, "x" * 30_000])
def test_status_says_the_cause_in_five_lines(directory: RunDirectory, reason: str) -> None:
    log = AttemptLog(directory)
    log.end(log.start(TRAIN), 78, reason)
    shown = status_of(directory, width=80, terminal=True).splitlines()
    cause = shown[2:]
    assert len(cause) == 5 and all(len(line) <= 80 for line in [*shown[:2], *cause[:4]]) and cause[0][:3] in reason
    assert cause[-1] == f"… the rest: tango logs {directory.path}"
    (_, line) = status_of(directory, width=80, terminal=False).splitlines()  # a pipe: one line a run
    assert len(line) < 700 and line.endswith("… (`tango logs` shows all of it)")
    log.end(log.start(TRAIN), 78, "the model folder lacks tokenizer.json")
    assert "the model folder lacks tokenizer.json" in status_of(directory, width=80, terminal=False)


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()])
def test_a_holder_out_of_sight_lives_as_long_as_it_touches_its_lock(directory: RunDirectory, host: str) -> None:
    """On a workstation without Slurm, say, whose disk is seen from here; or in a container of this machine."""
    other = replace(Process.this(), host=host, namespace="pid:[1]")
    leave_lock(directory, other)
    AttemptLog(directory).start(TRAIN)
    assert is_held(directory) and run_state(directory, {}).state == "running"
    shown = io.StringIO()
    cancel(directory.path, Console(file=shown, width=200))
    assert (
        f"process {other.pid} on {host} runs it, out of reach from here: `tango stop` ends the run" in shown.getvalue()
    )
    stop(directory.path, Console(file=io.StringIO()))
    assert directory.stop_file.exists()
    leave_lock(directory, replace(other, boot="before", host=socket.gethostname()))
    assert not is_held(directory), "the machine was started anew"
    leave_lock(directory, other)
    os.utime(directory.lock_file, (1e9, 1e9))
    assert not is_held(directory) and run_state(directory, {}).state == "lost"


@pytest.mark.parametrize(
    ("restarts", "touched", "refused"), [("0", True, True), ("0", False, False), ("1", True, False)]
)
def test_another_node_of_the_same_job(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, restarts: str, touched: bool, refused: bool
) -> None:
    """A second start in an allocation is refused; what a requeued job has left on another node is taken over."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    holder = replace(Process.this(), host="n1", boot="of n1")
    directory.lock_file.write_text(json.dumps({**asdict(holder), "job": "7", "id": "of-n1"}))
    if not touched:
        os.utime(directory.lock_file, (1e9, 1e9))
    with pytest.raises(UserError, match="Slurm job 7 on n1 is running in") if refused else nullcontext():
        check_lock(directory)


@pytest.mark.parametrize("missing", [True, False])
def test_a_signal_without_pidfd(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    """Pythons that were built without it, kernels before 5.3, and containers that do not allow the call."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    if missing:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen(["sleep", "60"])
    known = Process.of(process.pid)
    assert known is not None
    assert not replace(known, start=known.start - 1).send(signal.SIGTERM)
    assert known.send(signal.SIGTERM) and process.wait(timeout=10) == -signal.SIGTERM


def test_a_file_that_is_replaced_on_another_node_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale, read = [True, True], Path.read_bytes

    def as_on_nfs(path: Path) -> bytes:
        if stale:
            stale.pop()
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    (tmp_path / "beat.json").write_text('{"pid": 7}')
    monkeypatch.setattr(Path, "read_bytes", as_on_nfs)
    assert read_json(tmp_path / "beat.json") == {"pid": 7} and stale == []


def status_of(directory: RunDirectory, *, width: int, terminal: bool) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=terminal, color_system=None)
    show_status(directory.path, console, as_json=False)
    return shown.getvalue()


def test_nobody_has_a_run_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = RunDirectory(tmp_path / "file" / "run")
    check_lock(below)
    assert not is_held(below) and submitted_jobs(below) == [] and AttemptLog(below).read() == []


def test_submitted_processes_are_known_for_good(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(["sleep", "60"])
    job = SimpleNamespace(job_id=str(process.pid), paths=SimpleNamespace(stdout="log"))
    remember_job(directory, "train", "local", job, None)
    (entry,) = submitted_jobs(directory)
    assert submitted_process(entry).is_alive and run_state(directory, {}).state == "running"
    process.kill()
    process.wait()
    assert not submitted_process(entry).is_alive and run_state(directory, {}).state == "failed"
    entry["process"] |= {"pid": os.getpid()}  # somebody else has its id now
    assert not submitted_process(entry).is_alive
    directory.jobs_file.write_text("[{")
    assert submitted_jobs(directory) == [] and "jobs.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("process", [{"pid": 5, "strat": 3}, {"pid": "5"}, {"pid": 10**30}, {"boot": 3}, "x", [1], 5])
def test_a_submitted_process_that_is_none_is_passed_over(directory: RunDirectory, process: object) -> None:
    entry = {"job": "5", "stages": "train", "cluster": "local", "log": "none", "submitted": 1.0, "process": process}
    directory.jobs_file.write_text(json.dumps([entry]))
    assert "its process ended before the run started" in status_of(directory, width=200, terminal=False)
    told = io.StringIO()
    cancel(directory.path, Console(file=told, width=200))
    assert "nothing runs or waits" in told.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        {"after": [1]},
        {"job": "6\0"},
        {"job": "6\ud800"},
        {"log": "a\0b"},
        {"profile": 5},
        {"unwanted": {}},
        {"log": None},
        None,
    ],
)
def test_a_submitted_job_that_is_none_is_passed_over_and_counted(
    directory: RunDirectory, damage: dict[str, object] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"job": "5", "stages": "train", "cluster": "slurm", "log": "none", "submitted": 1.0}
    damaged = json.dumps([entry, damage and entry | {"job": "6"} | damage])
    directory.jobs_file.write_text(damaged)
    assert [job["job"] for job in submitted_jobs(directory)] == ["5"]
    env = {"SLURM_JOB_ID": "5", slurm.BATCH_MARK: f"5:{os.getpid()}"}
    command = resume_command(directory, "train", env)
    assert command == f"tango submit train {directory.config} --resume" and chain_before(directory, "6") == []
    assert f"Warning: {directory.jobs_file} is damaged: 1 of its jobs passed over\n" in capsys.readouterr().err
    forget_job(directory, "7")
    assert [job["job"] for job in submitted_jobs(directory)] == ["5"]
    assert directory.jobs_file.with_name("jobs.json.damaged").read_text() == damaged


@pytest.mark.parametrize("job", ["1\0", "1\ud800", "a/../b", ""])
def test_an_attempts_job_that_is_called_what_no_job_can_be_is_passed_over(directory: RunDirectory, job: str) -> None:
    line = {"number": 1, "stage": "train", "host": "h", "job": job, "started": 1.0, "saved_before": None}
    directory.attempts_file.write_text(json.dumps(line) + "\n")
    assert run_state(directory, {}).job is None and known_jobs(directory) == []
    cancel(directory.path, Console(file=io.StringIO(), width=200))


@pytest.mark.parametrize("name", ["a/../../b", "", "a\0b", "x" * 300, "ü"])
def test_a_lock_that_is_called_what_no_file_can_be_is_taken_over(directory: RunDirectory, name: str) -> None:
    damaged = asdict(Holder(host="elsewhere", boot="b", pid=4, start=5, job=name, id=name))
    directory.lock_file.write_text(json.dumps(damaged))
    os.utime(directory.lock_file, (1, 1))
    check_lock(directory)
    assert not is_held(directory)
    with RunLock(directory):
        assert [file.name for file in directory.control.glob("lock*")] == ["lock"]


def test_of_a_damaged_process_the_values_that_fit_are_kept(directory: RunDirectory) -> None:
    entry = {"process": asdict(Process.this()) | {"namespace": 3, "strat": 3}}
    assert submitted_process(entry) == replace(Process.this(), namespace="")
