"""One attempt of a run, wherever it runs: the same function under `tango train`, plain sbatch, submitit and salloc.

Inside a Slurm job the ranks go through srun. When they have saved because the machine is taken away (time limit,
preemption, SIGTERM), the job requeues itself and the next attempt continues; when the user asked for the end
(`tango stop`, scancel), it does not, and neither does a job that is not there for this run, such as a notebook's. A
failure is tried again only if this attempt got somewhere, or a node kept a restarted job from starting. In a chain
(`launch.chain`) the next job takes the place of the requeued one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import CheckFailed, NodeFailed, UserError
from tango_hpc.base.files import explain_disk, is_of_disk
from tango_hpc.base.formats import say
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_summary, resumed_from, update_summary
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog
from tango_hpc.runner.chain import Chain
from tango_hpc.runner.continuity import compare_with_last, refuse
from tango_hpc.runner.deadline import Deadline
from tango_hpc.runner.enter import Entry, is_done
from tango_hpc.runner.environment import check_nodes, place
from tango_hpc.runner.lock import RunLock, take_lock
from tango_hpc.runner.outcome import STOPPED
from tango_hpc.runner.program import Program
from tango_hpc.runner.provenance import record_attempt
from tango_hpc.runner.requeue import requeue, resume_command
from tango_hpc.runner.snapshot import check_runs_snapshot
from tango_hpc.runner.starters import LocalStarter, SrunStarter, Starter
from tango_hpc.runner.stop import read_stop_request
from tango_hpc.runner.supervisor import ENDED_WHILE_LOADING, Supervisor

NEVER_RETRY = (0, UserError.exit_code, CheckFailed.exit_code)
NOT_OURS = (
    "but one that it was started in (a batch script of yours needs the two lines that say so in slurm/train.sbatch: "
    f"export {slurm.BATCH_MARK}, and exec)"
)


def run_attempt(
    directory: RunDirectory,
    program: Program,
    config: Config,
    console: Console,
    entry: Entry | None = None,
    chain: Chain | None = None,
) -> int:
    """Run `program` from its last checkpoint and return the exit code; a batch job may requeue itself, or leave to the
    next.

    `entry` is the entry of this process into the run, if there was one; `chain` the jobs that continue each other, if
    this job is one of them.
    """
    if is_done(directory, program.name) and not program.has_more_to_do(config):
        say(console, f"{program.name} in {directory.path} is done already.")
        return 0
    with ExitStack() as stack:
        if entry is None:
            lock = take_lock(directory, partial(say, console))
            stack.callback(lock.release)
        else:
            lock = entry.lock
        run = JobAttempt(directory, program, config, console, lock, chain)
        if (reason := run.not_wanted()) is not None:
            return run.leave_unstarted(reason)
        directory.stop_file.unlink(missing_ok=True)  # a request to the attempt before
        attempt = run.log.start(program)
        if (reason := run.given_up(attempt)) is not None:
            return run.give_up(attempt, reason)
        try:
            run.check(entry)
            supervisor = run.supervisor()
            code = supervisor.run()
        except UserError as error:
            _note_failure(directory, run.log, attempt, error.exit_code, str(error))
            raise
        stopped_by_user = run.record_end(attempt, supervisor, code)
        if code == 0:
            return 0
        if code not in NEVER_RETRY and not stopped_by_user and run.job is not None:
            run.continue_elsewhere(attempt, supervisor, code)
        say(console, f"Continue with: {run.command}" if code == STOPPED else f"Logs of the ranks: {directory.logs}")
        return code


class JobAttempt:
    """The steps of one attempt at `program`, in this process and, where there is one, its Slurm job."""

    def __init__(
        self,
        directory: RunDirectory,
        program: Program,
        config: Config,
        console: Console,
        lock: RunLock,
        chain: Chain | None,
    ) -> None:
        self.directory, self.program, self.config = directory, program, config
        self.lock, self.chain = lock, chain
        self.log = AttemptLog(directory)
        self.job = slurm.job_id()
        self.deadline = job_deadline(self.job)
        self.command = resume_command(directory, program.name)
        self.is_continued = bool(slurm.restarts()) or (chain is not None and chain.is_continuation)
        self._console = console
        self._say = partial(say, console)

    def not_wanted(self) -> str | None:
        """Return why the attempt is not to start, if the user or the chain has said so."""
        asked = read_stop_request(self.directory)
        if asked is not None and asked.by == "user":
            return asked.why
        return self.chain.why_not() if self.chain is not None else None

    def leave_unstarted(self, reason: str) -> int:
        """Say that nothing is started; record it where `tango status` would miss it."""
        again = " again" if self.is_continued else ""
        self._say(f"{reason}: not started{again}. Continue with: {self.command}")
        if not self.is_continued:
            self.log.end(self.log.start(self.program), STOPPED, reason)
        return STOPPED

    def given_up(self, attempt: Attempt) -> str | None:
        """Return why a continued job does not try once more, if its last attempts left nothing new."""
        if not self.is_continued:
            return None
        jobs = self.chain.jobs if self.chain is not None else [attempt.job or ""]
        return _given_up(self.log, self.program, jobs, self.config.launch.max_attempts_without_progress)

    def give_up(self, attempt: Attempt, reason: str) -> int:
        """Record and say that the attempt is given up."""
        _note_failure(self.directory, self.log, attempt, 1, reason)
        self._say(f"{reason}. Continue with: {self.command}")
        return 1

    def check(self, entry: Entry | None) -> None:
        """Check the inputs as this machine sees them, unless `entry` has, and record what the attempt computes with.

        Raises UserError for wrong inputs, and for a disk without room for one checkpoint.
        """
        program, config = self.program, self.config
        refused: list[str] = []
        computes_with = self._checked(entry)
        if computes_with is None:
            computes_with, refused = compare_with_last(self.directory, program, config)
        record_attempt(
            self.directory, stage=program.name, record_diff=config.run.record_diff, computes_with=computes_with
        )
        if entry is None:
            program.check_inputs(config)
        if (note := program.check_disk(self.directory, config)) is not None:
            self._say(f"Note: {note}")
        refuse(self.directory, refused)

    def _checked(self, entry: Entry | None) -> dict[str, Any] | None:
        """Return what `entry` found that the attempt computes with; None where it did not look, or inputs were made
        since.
        """
        computes_with = entry.computes_with.get(self.program.name) if entry is not None else None
        if computes_with is None:
            return None
        present = {key for key, path in self.program.inputs(self.config) if path.exists()}
        return computes_with if computes_with["inputs"].keys() == present else None

    def supervisor(self) -> Supervisor:
        """Return the supervisor of the ranks, not started yet."""
        return Supervisor(
            self.directory,
            self.config,
            self.program.roles(self.config),
            _starter(self.directory, self.program, self.config, self._console),
            self._console,
            view=partial(self.program.view, self.directory, self._console),
            deadline=self.deadline,
            on_poll=partial(_on_poll, self.lock, self.chain),
        )

    def record_end(self, attempt: Attempt, supervisor: Supervisor, code: int) -> bool:
        """Record how the attempt ended and return whether the user has asked for the end.

        What cannot be written is said, and the attempt's exit code stays.
        """
        unwritten: list[str] = []
        attempt.went_on_from(resumed_from(self.directory, self.program.name))
        has_saved = attempt.is_progress(self.program.progress(self.directory))
        with _noting(unwritten):
            self.log.end(attempt, code, _told(supervisor.reason, saved=has_saved))
        # A request counts that came when no rank was left to see it, too: while a failure was being cleared away, say.
        asked = read_stop_request(self.directory)
        stopped_by_user = supervisor.stopped_by_user or (asked is not None and asked.by == "user")
        if not stopped_by_user:
            with _noting(unwritten):
                self.directory.stop_file.unlink(missing_ok=True)
        if code not in (0, STOPPED):
            seconds = (attempt.ended or 0) - attempt.started
            with _noting(unwritten):
                update_summary(self.directory, self.program.name, "failed", attempt_seconds=seconds)
        if unwritten:
            self._say(f"not written down: {unwritten[0]}")
        return stopped_by_user

    def continue_elsewhere(self, attempt: Attempt, supervisor: Supervisor, code: int) -> None:
        """Requeue the job or leave to the next of the chain, which ends this process; else say why not."""
        if not slurm.is_batch_process():
            self._say(f"Not requeued: job {self.job} is not this run's own, {NOT_OURS}.")
            return
        if not (attempt.made_progress or _may_pass(code, supervisor, is_continued=self.is_continued)):
            self._say("Not tried again: this attempt made no progress.")
            return
        assert self.job is not None
        left = self.deadline.left() if self.deadline is not None else None
        wait = partial(_wait, self.lock)
        if self.chain is not None:
            if self.chain.goes_on(left, self.command, wait):
                _leave(self.lock, self.config.launch.stopped_exit_code if code == STOPPED else code)
        elif requeue(self.job, self.directory, left, say=self._say, wait=wait, command=self.command):
            _leave(self.lock, code)


def _may_pass(code: int, supervisor: Supervisor, *, is_continued: bool) -> bool:
    """Return whether an attempt without progress ended for what need not be so the next time.

    A machine that fails is taken for that only where the job was started before: else it asks for too little.
    """
    if supervisor.request is not None or supervisor.was_suspended:
        return True
    return is_continued and code == NodeFailed.exit_code


def _on_poll(lock: RunLock, chain: Chain | None) -> None:
    lock.touch()
    if chain is not None:
        chain.submit()


def _wait(lock: RunLock, seconds: float) -> None:
    lock.touch()
    time.sleep(seconds)


def _given_up(log: AttemptLog, program: Program, jobs: Sequence[str], limit: int) -> str | None:
    """Return why `jobs` are given up, if their last `limit` attempts left no new checkpoint or result."""
    if log.without_progress(program, jobs) <= limit:
        return None
    last = log.read()[-limit - 1 : -1]
    names = list(dict.fromkeys(before.job or "" for before in last))
    which = f"job{'s' if len(names) > 1 else ''} {', '.join(names)}"
    if all(before.reason.endswith(ENDED_WHILE_LOADING) for before in last):
        longest = max((before.ended or before.started) - before.started for before in last)
        return (
            f"given up: {limit} attempts of {which} in a row never got past loading, the longest in "
            f"{longest:.0f} s; ask for more time (time in the profile, --time of sbatch), or load from the nodes' own "
            "disks (stage_weights_to in the profile)"
        )
    return (
        f"given up: {limit} attempts of {which} in a row ended without a new {program.saves} "
        "(launch.max_attempts_without_progress)"
    )


def _told(reason: str, *, saved: bool) -> str:
    """Return why an attempt ended; its ranks may have saved after they were taken to be loading."""
    return reason.removesuffix(f": {ENDED_WHILE_LOADING}") if saved else reason


@contextmanager
def _noting(unwritten: list[str]) -> Iterator[None]:
    """Note errors of writing in `unwritten` instead of raising them."""
    try:
        yield
    except OSError as error:
        unwritten.append(explain_disk(error) if is_of_disk(error) else str(error))


def _note_failure(directory: RunDirectory, log: AttemptLog, attempt: Attempt, code: int, reason: str) -> None:
    """Record for `tango status` and `tango logs` that the attempt ended before any rank was started.

    One that was refused (code 2) leaves a stage done or stopped, as it was.
    """
    log.end(attempt, code, reason)
    before = read_summary(directory).get("stages", {}).get(attempt.stage, {}).get("status")
    if code != UserError.exit_code or before not in ("done", "stopped"):
        update_summary(directory, attempt.stage, "failed")


def run_programs(
    directory: RunDirectory, programs: Sequence[Program], console: Console, snapshot: Path | None = None
) -> int:
    """Run `programs` one after the other until one does not end with 0, with no other code than that of `snapshot`."""
    try:
        if snapshot is not None:
            check_runs_snapshot(snapshot)
        config = load_config(directory.config)
    except UserError as error:  # a folder that this machine does not see, say
        log = AttemptLog(directory)
        _note_failure(directory, log, log.start(programs[0]), error.exit_code, str(error))
        raise
    code, chain = 0, Chain.of_this_job(directory, partial(say, console))
    try:
        for program in programs:
            code = run_attempt(directory, program, config, console, chain=chain)
            if code != 0:
                break
    finally:  # a job that the next one continues has left before
        if chain is not None:
            chain.end(f"job {slurm.job_id()} has ended the chain")
    return code


def exit_code_of_job(directory: RunDirectory, code: int) -> int:
    """Return the exit code of this process: a batch job that saved and stopped on request has not failed."""
    if code == STOPPED and slurm.is_batch_process():
        return load_config(directory.config).launch.stopped_exit_code
    return code


def _starter(directory: RunDirectory, program: Program, config: Config, console: Console) -> Starter:
    where = place(os.environ, config.world_size)
    assert where != "rank", "ranks do not supervise"
    check_nodes(config.launch, where)
    if where == "alone":
        return LocalStarter(directory, program, config)
    return SrunStarter(directory, program, config, partial(say, console))


def job_deadline(job: str | None) -> Deadline | None:
    """Return the end of `job`; None where there is none."""
    return None if job is None else Deadline(partial(slurm.seconds_left, job))


def _leave(lock: RunLock, code: int) -> NoReturn:
    """End this process now: after a requeue Slurm kills it anyway, and nothing may report a result any more."""
    lock.release()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)
    os._exit(code)
