"""A process whose disk takes nothing more says how it ended through the supervisor of its machine."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from tango_hpc.base.files import explain_disk, is_of_disk, write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner import outcome as outcomes
from tango_hpc.runner.guard import run_guarded
from tango_hpc.runner.heartbeat import PhaseBoard
from tango_hpc.runner.outcome import LAST_WORDS, Outcome, outcome_of, read_outcomes, said_last, write_outcome
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.stop import STOP_SIGNALS

READ_ONLY = OSError(errno.EROFS, "Read-only file system", "/run/progress.json")


def refuse(*_: object, **__: object) -> None:
    raise READ_ONLY


def test_failures_go_through_the_pipe_once_and_the_cause_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    directory.outcomes.mkdir()
    monkeypatch.setattr(outcomes, "write_atomically", refuse)
    monkeypatch.setattr(outcomes, "TRY_SECONDS", 0.0)
    with pytest.raises(OSError):
        write_outcome(directory, Outcome(0, "generator", "boom"))
    reads, writes = os.pipe()
    monkeypatch.setenv(LAST_WORDS, str(writes))
    echo = outcome_of(Worker(0, "verifier"), "train", RuntimeError("Connection closed by peer"))
    cause = outcome_of(Worker(1, "generator"), "verify", READ_ONLY)
    for told in (
        echo,
        cause,
        Outcome(1, "generator", "exit code 0"),
        Outcome(0, "generator", "x" * 9999, traceback="ü" * 9999),
    ):
        write_outcome(directory, told)
    with pytest.raises(OSError):  # it came to its end: nobody may believe the contrary
        write_outcome(directory, Outcome(1, "verifier", code=0))
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = said_last(pipe.read() + b'{"rank": 3, "err')
    assert [(word.rank, word.role) for word in said] == [(0, "generator"), (1, "generator"), (0, "verifier")]
    assert said[1] == cause and cause.code == 78
    assert cause.error == (
        "OSError: Read-only file system: /run/progress.json; see why it cannot be written (`mount`, `dmesg`) and "
        "continue with --resume"
    )
    assert read_outcomes(directory) == {}


def test_a_process_that_cannot_even_open_its_crash_file_leaves_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)  # without the folder in which that file and outcomes lie
    monkeypatch.setattr(outcomes, "TRY_SECONDS", 0.0)
    monkeypatch.setattr(outcomes, "write_atomically", refuse)
    reads, writes = os.pipe()
    monkeypatch.setenv(LAST_WORDS, str(writes))
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        run_guarded(RankProcess(directory, Worker(1, "generator"), reads_file=False), lambda _: None)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        [said] = said_last(pipe.read())
    assert said.worker == Worker(1, "generator") and "No such file or directory" in said.error


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError) as failure:
        write_atomically(tmp_path / "there" / "missing" / "file", "text")
    assert failure.value.filename == str(tmp_path / "there" / "missing" / "file")
    assert not is_of_disk(failure.value)
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))
    assert is_of_disk(full) and "MB free there); make room and continue with --resume" in explain_disk(full)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_process_without_memory_says_what_to_do(error: Exception) -> None:
    told = outcome_of(Worker(0, "generator"), "train", error)
    assert told.code == 1 and not told.echo and "got no more memory: ask for more, or lower" in told.title()
    assert str(error) in told.error and told.traceback
    assert "no more memory" not in outcome_of(Worker(0), "train", ValueError("no")).error


def test_the_phase_of_a_process_outlives_it() -> None:
    board = PhaseBoard()
    assert board.read() == ""
    pid = os.fork()
    if not pid:
        board.write("loading " + 300 * "x")
        board.write("rollout")
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.read() == "rollout"
