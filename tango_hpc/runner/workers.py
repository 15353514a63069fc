"""The program of a task: it starts one process per rank and role and waits for them.

Under Slurm a task is one rank; on one machine a single task is all of its ranks. On CPUs a task imports what is heavy
before it forks its processes, which share the pages; on GPUs each process imports by itself (stages/rank.py).

The one rule of a task's exit code: under a supervisor it is 0 as soon as there is an outcome for each of its
processes, whatever that says, since srun kills the other tasks of a step at the first other code, in the middle of
their saving; the supervisor takes the code from the outcomes. Without a supervisor (`srun tango train`) it is the code
of the cause.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType

from tango_hpc.base.errors import CheckFailed, NodeFailed, UserError
from tango_hpc.base.files import Patience
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.environment import own_ranks, prepare_rank
from tango_hpc.runner.guard import SUPERVISED, die_with_parent, run_guarded
from tango_hpc.runner.heartbeat import Beat, PhaseBoard, write_beat
from tango_hpc.runner.lock import RunLock, take_lock
from tango_hpc.runner.outcome import STOPPED, Outcome, outcome_of, outcome_of_dead, read_outcome, write_outcome
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.slurm import NoAnswer
from tango_hpc.runner.stop import STOP_SIGNALS

Body = Callable[[Worker, RankProcess], None]

LOADING = "loading libraries"
POLL_SECONDS = 1.0
# After the first failure of one of its processes a task gives the others this long to notice.
NOTICE_SECONDS = 30.0
# How long a file system may be away before the processes are given up for it; they may need it less.
BEARS_SECONDS = 1800.0


def host_ranks(directory: RunDirectory, prepare: Callable[[], tuple[Sequence[str], Body]]) -> int:
    """Be the task that this environment describes; its exit code.

    `prepare` imports what the processes may share and returns the roles and what each process does. What goes wrong in
    it is written down as the failure of the rank. Without a supervisor the task of rank 0 holds the run's lock;
    UserError or CheckFailed where another process has it.
    """
    if SUPERVISED in os.environ or own_ranks()[0] != 0:
        return _host_ranks(directory, prepare, None)
    directory.control.mkdir(exist_ok=True)
    lock = take_lock(directory)
    try:
        return _host_ranks(directory, prepare, lock)
    finally:
        lock.release()


def _host_ranks(
    directory: RunDirectory, prepare: Callable[[], tuple[Sequence[str], Body]], lock: RunLock | None
) -> int:
    supervisor = os.environ.get(SUPERVISED, "")
    die_with_parent(int(supervisor) if supervisor.isdigit() else None)
    signals = _Signals()
    directory.outcomes.mkdir(exist_ok=True)
    directory.heartbeats.mkdir(exist_ok=True)
    ranks = own_ranks()
    directory.outcome_file(Worker(ranks[0])).unlink(missing_ok=True)  # of an attempt that had no supervisor to clear it
    try:
        os.environ.update(prepare_rank(directory))
        roles, body = prepare()
    except BaseException as error:
        cause = error
        if isinstance(error, NoAnswer):  # of Slurm's controller
            cause = NodeFailed(str(error))
        elif isinstance(error, UserError) and not isinstance(error, NodeFailed):
            cause = CheckFailed(str(error))
        outcome = outcome_of(Worker(ranks[0]), LOADING, cause)
        write_outcome(directory, outcome)
        _print_if_possible(error)
        return _exit_code([outcome])
    if lock is not None:
        lock.touch()  # raises where another process took the run during a long import: nothing is written then
    workers = [Worker(rank, role) for rank in ranks for role in roles]
    children = ChildProcesses(directory, workers, signals, lock)
    try:
        return _exit_code(children.run(body))
    except BaseException as error:  # a full disk, no more processes: those that were started would wait for the others
        children.kill()
        outcome = outcome_of(Worker(ranks[0]), LOADING, error)
        write_outcome(directory, outcome)
        _print_if_possible(error)
        return _exit_code([outcome])


def _print_if_possible(error: BaseException) -> None:
    with suppress(OSError):  # the log may be on a full disk
        traceback.print_exception(error)


class _Signals:
    """Receives signals that ask for a stop and passes them on to the processes."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.processes: dict[Worker, BaseProcess] = {}
        self._owner = os.getpid()
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if os.getpid() == self._owner:  # else it is a child that has no handlers of its own yet
            self.pass_on(number)

    def pass_on(self, number: int) -> None:
        for process in self.processes.values():
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(process.pid, number)


class ChildProcesses:
    """The processes that a task forks."""

    def __init__(
        self, directory: RunDirectory, workers: Sequence[Worker], signals: _Signals, lock: RunLock | None
    ) -> None:
        self._directory, self._workers, self._signals, self._lock = directory, workers, signals, lock
        self._boards = {worker: PhaseBoard() for worker in workers}
        self._parent = os.getpid()

    def kill(self) -> None:
        """End those that were started."""
        for process in self._signals.processes.values():
            process.kill()
            process.join()

    def run(self, body: Body) -> list[Outcome]:
        """Start them, wait for them, see that each has an outcome."""
        context = multiprocessing.get_context("fork")
        beat = Beat(host=socket.gethostname(), pid=os.getpid(), phase=LOADING)
        sys.stdout.flush()
        sys.stderr.flush()
        for worker in self._workers:
            self._directory.outcome_file(worker).unlink(missing_ok=True)
            write_beat(self._directory, worker, beat)
            process = context.Process(target=self.child_main, args=(worker, body), name=str(worker))
            process.start()
            self._signals.processes[worker] = process
        for number in self._signals.received:  # those that came before all of them were there
            self._signals.pass_on(number)
        return self.wait(dict(self._signals.processes))

    def wait(self, running: dict[Worker, BaseProcess]) -> list[Outcome]:
        """Wait for all; where one fails and the others do not notice, or it does not exit, they are ended."""
        outcomes: list[Outcome] = []
        end_by = None
        patience = Patience(BEARS_SECONDS)
        while running:
            connection.wait([process.sentinel for process in running.values()], POLL_SECONDS)
            for worker, process in list(running.items()):
                if process.exitcode is None:
                    continue
                del running[worker]
                outcomes.append(self._outcome(worker, process.exitcode))
            written: list[Outcome | None] = []
            with patience:
                if self._lock is not None:
                    self._lock.touch()
                written = [read_outcome(self._directory, worker) for worker in running]
            if end_by is None and any(outcome.failed for outcome in [*outcomes, *filter(None, written)]):
                end_by = time.monotonic() + NOTICE_SECONDS
            if end_by is not None and time.monotonic() > end_by:
                for worker, process in running.items():
                    process.kill()
                    process.join()
                    outcomes.append(self._outcome(worker, None))
                running.clear()
        return outcomes

    def _outcome(self, worker: Worker, returncode: int | None) -> Outcome:
        """Return the outcome that an ended process wrote, or one made for it. `returncode` None: this task ended the
        process.
        """
        written = read_outcome(self._directory, worker)
        if written is not None:
            return written
        if returncode is None:
            ended = f"ended {NOTICE_SECONDS:.0f} s after another process of its rank had failed"
            outcome = Outcome(*worker, ended, host=socket.gethostname(), echo=True, time=time.time())
        else:
            outcome = outcome_of_dead(self._directory, worker, returncode, self._boards[worker].read())
        write_outcome(self._directory, outcome)
        with suppress(OSError):  # on a disk that has become read-only it stays
            self._directory.crash_file(worker).unlink(missing_ok=True)
        return outcome

    def child_main(self, worker: Worker, body: Body) -> None:
        """Be one child process from its start to its end."""
        self._signals.processes = {}
        die_with_parent(self._parent)
        _name_process(f"{worker.role}-{worker.rank}")
        if SUPERVISED in os.environ:  # else a user watches the output of the task
            log = os.open(self._directory.log_file(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            os.close(log)
        reads_file, board = worker == self._workers[0] and worker.rank == 0, self._boards[worker]
        process = RankProcess(self._directory, worker, reads_file=reads_file, board=board)
        process.stop.install()
        for number in self._signals.received:
            process.stop.receive(number)
        run_guarded(process, lambda process: body(worker, process))


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    if SUPERVISED in os.environ:
        return 0
    failures = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda end: (end.echo, end.time))
    if failures:
        return failures[0].code
    return STOPPED if any(outcome.code == STOPPED for outcome in outcomes) else 0


def _name_process(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, 15 characters at most (Linux)."""
    pr_set_name = 15
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)
