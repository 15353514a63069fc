"""The outcome of a process: RUN/outcomes/rank_NNNNN.ROLE.json.

A process writes its outcome last. For a process that was killed or crashed, its parent writes it (runner/workers.py),
with the stacks that Python left in rank_NNNNN.ROLE.crash. `tango logs` and the supervisor report failures from here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter, ValidationError

from tango_hpc.base.errors import CheckFailed, StoppedEarly, UserError
from tango_hpc.base.files import explain_disk, is_of_disk, read_json, write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.heartbeat import read_beat

STOPPED = StoppedEarly.exit_code
RESERVED_BYTES = 2**15
# Names the file descriptor of a pipe to the supervisor of this machine: for an outcome that the disk does not take.
LAST_WORDS = "TANGO_LAST_WORDS"
MORE_MEMORY = (
    "This process got no more memory: ask for more, or lower rollout.kv_cache_gb, rollout.max_num_seqs or "
    "micro_batch_tokens of the roles (`tango plan` says what is needed)"
)
TRIES, TRY_SECONDS = 5, 0.3


@dataclass(frozen=True)
class Outcome:
    """The end of a process; of all processes of a rank where `role` is ""; of all ranks where `rank` is None.

    The exit code of the run is that of its first failure.
    """

    rank: int | None
    role: str = ""
    error: str = ""
    code: int = 1
    host: str = ""
    phase: str = ""
    traceback: str = ""
    echo: bool = False  # this process failed only because another one had gone
    time: float = 0.0  # Unix seconds

    @property
    def failed(self) -> bool:
        """Return whether the process neither finished nor stopped on request."""
        return self.code not in (0, STOPPED)

    @property
    def worker(self) -> Worker | None:
        """Return the process that ended; None for all together."""
        return None if self.rank is None else Worker(self.rank, self.role)

    def title(self) -> str:
        """Return one line that names rank, role, node and phase."""
        if self.worker is None:
            return self.error
        where = f" on {self.host}" if self.host else ""
        phase = f" in phase '{self.phase}'" if self.phase else ""
        return f"{self.worker}{where} failed{phase}: {self.error}"

    def text(self) -> str:
        """Return the title and the traceback."""
        return f"{self.title()}\n{self.traceback}".rstrip()


RECORD = TypeAdapter(Outcome)


def outcome_of(worker: Worker, phase: str, error: BaseException | None) -> Outcome:
    """Return the outcome of this process, which `error` ended in `phase`."""
    code = 0 if error is None else getattr(error, "exit_code", 1)
    if isinstance(error, OSError) and is_of_disk(error):
        code = CheckFailed.exit_code  # trying again would meet the same disk
    ended = Outcome(*worker, code=code, host=socket.gethostname(), phase=phase, time=time.time())
    if error is None or not ended.failed:
        return ended
    # The text of our own errors, and of a full disk, is the whole message; where they came from stands in the log.
    told, stacks = str(error), "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        stacks = ""
    elif isinstance(error, OSError) and is_of_disk(error):
        told, stacks = explain_disk(error), ""
    elif _is_out_of_memory(error):
        told = f"{told or 'out of memory'}. {MORE_MEMORY}".lstrip()
    return replace(
        ended,
        error=f"{type(error).__name__}: {told}",
        traceback=stacks,
        echo=_is_echo(error),
    )


def outcome_of_dead(directory: RunDirectory, worker: Worker, returncode: int, phase: str = "") -> Outcome:
    """Return an outcome for a process that wrote none and ended with `returncode` (negative: a signal).

    `phase`: the last known phase. The traceback is the one that Python wrote at a crash; else it is empty.
    """
    beat = read_beat(directory, worker)
    try:
        stacks = directory.crash_file(worker).read_text(errors="replace")
    except FileNotFoundError:
        stacks = ""
    error = stacks.partition("\n")[0] or describe_death(returncode)
    return Outcome(*worker, error, host=beat.host, phase=phase or beat.phase, traceback=stacks, time=time.time())


def describe_death(returncode: int) -> str:
    """Return the meaning of a dead process's return code, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    error = f"killed by {signal.Signals(-returncode).name}"
    if returncode == -signal.SIGKILL:
        error += " (out of memory? see dmesg, or seff and sacct on a cluster)"
    return error


def reserve_outcome(directory: RunDirectory, worker: Worker) -> None:
    """Reserve the disk space that an outcome needs, so that a full disk is reported too.

    The reserved bytes are random, or a file system that compresses would reserve nothing.
    """
    write_atomically(directory.reserve_file(worker), os.urandom(RESERVED_BYTES), durable=False)


def write_outcome(directory: RunDirectory, outcome: Outcome) -> None:
    """Write an outcome, in the disk space that was reserved for it.

    On a disk that takes nothing more, a failure goes to this machine's supervisor through the pipe `LAST_WORDS`.
    """
    assert outcome.worker is not None
    for tries_left in reversed(range(TRIES)):
        try:
            directory.reserve_file(outcome.worker).unlink(missing_ok=True)
            write_atomically(directory.outcome_file(outcome.worker), json.dumps(asdict(outcome)))
            return
        except OSError as error:
            if not is_of_disk(error) or not tries_left:
                if outcome.failed and LAST_WORDS in os.environ:
                    os.write(int(os.environ[LAST_WORDS]), _short(outcome))
                    return
                raise
        time.sleep(TRY_SECONDS)  # another process took the space; the next heartbeat frees its old file


def _short(outcome: Outcome) -> bytes:
    """Return an outcome as a line that a pipe takes at once, so that the lines of several processes do not mix."""
    for length in (2000, 500, 100):
        shortened = replace(outcome, error=outcome.error[:length], traceback=outcome.traceback[-length:])
        line = json.dumps(asdict(shortened), ensure_ascii=False).encode(errors="replace") + b"\n"
        if len(line) <= select.PIPE_BUF:
            break
    return line


def said_last(lines: bytes) -> list[Outcome]:
    """Return the failures that the processes of a task wrote to their supervisor's pipe, one a process.

    Causes come before echoes.
    """
    told: dict[Worker | None, Outcome] = {}
    for line in lines.splitlines():
        with contextlib.suppress(ValidationError):  # cut off
            outcome = RECORD.validate_json(line, strict=True)
            told.setdefault(outcome.worker, outcome)
    return sorted(told.values(), key=lambda outcome: (outcome.echo, outcome.time))


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, or the GPU, gave a process no more memory."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or refused or of_torch


def _is_echo(error: BaseException) -> bool:
    """Return whether a collective broke because another process had gone."""
    names = ("DistBackendError", "DistNetworkError", "DistStoreError", "PeerFailedError")
    if isinstance(error, ConnectionError) or type(error).__name__ in names:
        return True
    words = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "gloo")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def read_outcome(directory: RunDirectory, worker: Worker) -> Outcome | None:
    """Return the outcome of `worker`; None where the file is missing or damaged."""
    known = read_json(directory.outcome_file(worker))
    try:
        return RECORD.validate_python(known)
    except ValidationError:
        return None


def read_outcomes(directory: RunDirectory) -> dict[Worker, Outcome]:
    """Return the outcomes by worker, of the workers that have one."""
    workers = (Worker.from_stem(file.stem) for file in sorted(directory.outcomes.glob("rank_*.json")))
    found = ((worker, read_outcome(directory, worker)) for worker in workers)
    return {worker: outcome for worker, outcome in found if outcome is not None}


def read_failures(directory: RunDirectory) -> list[Outcome]:
    """Return the recorded failures, the likely cause first: echoes of a lost peer last, else by time."""
    found = [outcome for outcome in read_outcomes(directory).values() if outcome.failed]
    return sorted(found, key=lambda failure: (failure.echo, failure.time))


def find_cause(directory: RunDirectory, deaths: Iterable[Outcome]) -> list[Outcome]:
    """Return all failures, the cause first: written outcomes, then ranks that died without one, then echoes."""
    written = read_failures(directory)
    known = {failure.rank for failure in written}
    silent = [_with_phases(directory, death) for death in deaths if death.rank not in known]
    own = [failure for failure in written if not failure.echo]
    return own + silent + [failure for failure in written if failure.echo]


def _with_phases(directory: RunDirectory, death: Outcome) -> Outcome:
    """Return the death of a whole rank, with what its processes were doing."""
    if death.rank is None or death.phase:
        return death
    files = sorted(directory.heartbeats.glob(f"{Worker(death.rank).stem}.*.json"))
    workers = [Worker.from_stem(file.stem) for file in files]
    return replace(death, phase=", ".join(f"{read_beat(directory, w).phase} ({w.role})" for w in workers))


def clear_last_attempt(directory: RunDirectory) -> None:
    """Remove what the ranks of the previous attempt left."""
    for folder in (directory.outcomes, directory.heartbeats):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
