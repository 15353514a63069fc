"""One attempt of a run, wherever it runs: the same function under `tango train`, plain sbatch, submitit and salloc.

Inside a Slurm job the ranks go through srun. When they have saved because the machine is taken away (time limit,
preemption, SIGTERM), the job requeues itself and the next attempt continues; when somebody asked for the end
(`tango stop`, scancel), it does not, and neither does a job that is not there for this run, such as a notebook's. A
failure is tried again only if this attempt got somewhere, or a node kept a restarted job from starting. In a chain
(`launch.chain`) the next job takes the place of the requeued one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import CheckFailed, NodeFailed, UserError
from tango_hpc.base.files import explain_disk, is_of_disk
from tango_hpc.base.formats import say, visible
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import STEPPED_STAGES
from tango_hpc.base.run.summary import read_summary, resumed_from, update_summary
from tango_hpc.plan.disk import check_disk
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog, saved_so_far
from tango_hpc.runner.chain import Chain
from tango_hpc.runner.continuity import compare_with_last, refuse
from tango_hpc.runner.deadline import Deadline
from tango_hpc.runner.enter import is_done
from tango_hpc.runner.environment import check_nodes, place
from tango_hpc.runner.lock import RunLock, take_lock
from tango_hpc.runner.outcome import STOPPED
from tango_hpc.runner.provenance import record_attempt
from tango_hpc.runner.requeue import requeue, resume_command
from tango_hpc.runner.snapshot import check_runs_snapshot
from tango_hpc.runner.starters import LocalStarter, SrunStarter, Starter
from tango_hpc.runner.stop import read_stop_request
from tango_hpc.runner.supervisor import ENDED_WHILE_LOADING, Supervisor
from tango_hpc.stages.eval_inputs import was_trained_since
from tango_hpc.stages.preflight import check_inputs
from tango_hpc.stages.processes import process_roles

NEVER_RETRY = (0, UserError.exit_code, CheckFailed.exit_code)
NOT_OURS = (
    "but one that it was started in (a batch script of yours needs the two lines that say so in slurm/train.sbatch: "
    f"export {slurm.BATCH_MARK}, and exec)"
)


def run_attempt(
    directory: RunDirectory,
    stage: str,
    config: Config,
    console: Console,
    held: RunLock | None = None,
    chain: Chain | None = None,
) -> int:
    """Run `stage` from its last checkpoint and return the exit code; a batch job may requeue itself, or leave to the next.

    `held` is the run's lock where the caller has it, `chain` the jobs that continue each other, where this is one.
    """
    # What was trained since a stage asked its benchmarks is asked as well.
    if is_done(directory, stage) and not (stage == "eval" and was_trained_since(config)):
        say(console, f"{stage} in {directory.path} is done already.")
        return 0
    job = slurm.job_id()
    ours = job if slurm.is_batch_process() else None  # the job is there for this run, and may be requeued
    log = AttemptLog(directory)
    command = resume_command(directory, stage)
    with ExitStack() as stack:
        lock = held if held is not None else take_lock(directory, partial(say, console))
        if held is None:
            stack.callback(lock.release)
        asked = read_stop_request(directory)
        is_continued = bool(slurm.restarts()) or (chain is not None and chain.is_continuation)
        not_wanted = asked.why if asked is not None and asked.by == "user" else None
        not_wanted = not_wanted or (chain.why_not() if chain is not None else None)
        if not_wanted is not None:
            again = " again" if is_continued else ""
            say(console, f"{not_wanted}: not started{again}. Continue with: {command}")
            if not is_continued:  # `tango status` would miss it
                log.end(log.start(stage), STOPPED, not_wanted)
            return STOPPED
        if asked is not None:  # of the attempt before
            directory.stop_file.unlink(missing_ok=True)
        attempt = log.start(stage)
        jobs = chain.jobs if chain is not None else [attempt.job or ""]
        reason = _given_up(log, attempt, jobs, config.launch.max_attempts_without_progress) if is_continued else None
        if reason is not None:
            _note_failure(directory, log, attempt, 1, reason)
            say(console, f"{reason}. Continue with: {command}")
            return 1
        deadline = job_deadline(job)
        try:
            computes_with, refused = compare_with_last(directory, stage, config)
            record_attempt(directory, stage=stage, record_diff=config.run.record_diff, computes_with=computes_with)
            check_inputs(config, stage)  # as this machine sees them, and what the stage before has written
            if (note := check_disk(directory, config, stage)) is not None:
                say(console, f"Note: {note}")
            refuse(directory, refused)
            supervisor = Supervisor(
                directory,
                config,
                process_roles(config, stage),
                _starter(directory, stage, config, console),
                console,
                deadline=deadline,
                on_poll=partial(_on_poll, lock, chain),
            )
            code = supervisor.run()
        except UserError as error:
            _note_failure(directory, log, attempt, error.exit_code, str(error))
            raise
        unwritten: list[str] = []
        attempt.went_on_from(resumed_from(directory, stage))
        with _noting(unwritten):
            log.end(attempt, code, _told(supervisor.reason, saved=_has_saved(directory, attempt)))
        # Also one that came when no rank was left to see it, while a failure was being cleared away, say.
        asked = read_stop_request(directory)
        stopped_by_user = supervisor.stopped_by_user or (asked is not None and asked.by == "user")
        if not stopped_by_user:
            with _noting(unwritten):
                directory.stop_file.unlink(missing_ok=True)
        if code not in (0, STOPPED):
            with _noting(unwritten):
                update_summary(directory, stage, "failed", attempt_seconds=(attempt.ended or 0) - attempt.started)
        if unwritten:
            say(console, f"not written down: {unwritten[0]}")
        if code == 0:
            return 0
        if code not in NEVER_RETRY and not stopped_by_user and job is not None:
            if ours is None:
                say(console, f"Not requeued: job {job} is not this run's own, {NOT_OURS}.")
            elif not (attempt.made_progress or _may_pass(code, supervisor, is_continued=is_continued)):
                say(console, "Not tried again: this attempt made no progress.")
            else:
                left = deadline.left() if deadline is not None else None
                telling, waiting = partial(say, console), partial(_wait, lock)
                if chain is not None and chain.goes_on(left, command, waiting):
                    _leave(lock, config.launch.stopped_exit_code if code == STOPPED else code)
                if chain is None and requeue(ours, directory, left, say=telling, wait=waiting, command=command):
                    _leave(lock, code)
        if code == STOPPED:
            say(console, f"Continue with: {command}")
        else:
            say(console, f"Logs of the ranks: {directory.logs}")
        return code


def _may_pass(code: int, supervisor: Supervisor, *, is_continued: bool) -> bool:
    """Whether an attempt without progress ended for what need not be so the next time.

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


def _given_up(log: AttemptLog, attempt: Attempt, jobs: Sequence[str], limit: int) -> str | None:
    """Why a requeued job, or one of a chain of `jobs`, is not tried once more, if it is not.

    That is so where its last `limit` attempts left no new checkpoint or result.
    """
    if log.without_progress(attempt.stage, jobs) <= limit:
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
    what = "checkpoint" if attempt.stage in STEPPED_STAGES else "result"
    return (
        f"given up: {limit} attempts of {which} in a row ended without a new {what} "
        "(launch.max_attempts_without_progress)"
    )


def _has_saved(directory: RunDirectory, attempt: Attempt) -> bool:
    """Whether more is saved than what the attempt went on from."""
    return attempt.is_progress(saved_so_far(directory, attempt.stage))


def _told(reason: str, *, saved: bool) -> str:
    """Why an attempt ended; its ranks may have saved after they were taken to be loading."""
    return reason.removesuffix(f": {ENDED_WHILE_LOADING}") if saved else reason


@contextmanager
def _noting(unwritten: list[str]) -> Iterator[None]:
    """What cannot be written down is noted, and how the attempt ended goes on as it is."""
    try:
        yield
    except OSError as error:
        unwritten.append(explain_disk(error) if is_of_disk(error) else str(error))


def _note_failure(directory: RunDirectory, log: AttemptLog, attempt: Attempt, code: int, reason: str) -> None:
    """For `tango status` and `tango logs`: the attempt ended before any rank was started.

    One that was refused (code 2) leaves a stage done or stopped, as it was.
    """
    log.end(attempt, code, reason)
    before = read_summary(directory).get("stages", {}).get(attempt.stage, {}).get("status")
    if code != UserError.exit_code or before not in ("done", "stopped"):
        update_summary(directory, attempt.stage, "failed")


def run_stages(directory: RunDirectory, stages: str, console: Console, snapshot: Path | None = None) -> int:
    """Run "sft,train" and the like, one after the other, until one does not end with 0; no other code than `snapshot`."""
    try:
        if snapshot is not None:
            check_runs_snapshot(snapshot)
        config = load_config(directory.config)
    except UserError as error:  # a folder that this machine does not see, say
        log = AttemptLog(directory)
        _note_failure(directory, log, log.start(stages.partition(",")[0]), error.exit_code, str(error))
        raise
    code, chain = 0, Chain.of_this_job(directory, partial(say, console))
    try:
        for stage in stages.split(","):
            code = run_attempt(directory, stage, config, console, chain=chain)
            if code != 0:
                break
    finally:  # a job that the next one continues has left before
        if chain is not None:
            chain.end(f"job {slurm.job_id()} has ended the chain")
    return code


def run_job(run_dir: str, stages: str, snapshot: str | None = None) -> dict:
    """What a submitted job runs (submitit pickles the arguments, nothing else); returns the run's summary.

    So it does where the run saved and stopped, unless `launch.stopped_exit_code` wants another end than a good one.
    Raises RuntimeError where the run failed.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's handler would requeue, or fail, before and after the run
    directory = RunDirectory.open(run_dir)
    code = run_stages(directory, stages, Console(soft_wrap=True), Path(snapshot) if snapshot else None)
    if code == STOPPED and slurm.is_batch_process() and (ending := _exit_code(directory, code)) != 0:
        sys.exit(ending)
    if code not in (0, STOPPED):
        raise RuntimeError(f"{stages} in {run_dir} failed with exit code {code}; see `tango logs {run_dir}`")
    return read_summary(directory)


def _exit_code(directory: RunDirectory, code: int) -> int:
    """That of this process: a batch job that saved and stopped as it was told has not failed."""
    if code == STOPPED and slurm.is_batch_process():
        return load_config(directory.config).launch.stopped_exit_code
    return code


def _starter(directory: RunDirectory, stage: str, config: Config, console: Console) -> Starter:
    where = place(os.environ, config.world_size)
    assert where != "rank", "ranks do not supervise"
    check_nodes(config.launch, where)
    if where == "alone":
        return LocalStarter(directory, stage, config)
    return SrunStarter(directory, stage, config, partial(say, console))


def job_deadline(job: str | None) -> Deadline | None:
    """The end of `job`; None where there is none."""
    return None if job is None else Deadline(partial(slurm.seconds_left, job))


def _leave(lock: RunLock, code: int) -> NoReturn:
    """End this process now: after a requeue Slurm kills it anyway, and nothing may report a result any more."""
    lock.release()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)
    os._exit(code)


def main() -> int:
    """`python -m tango_hpc.runner.job RUN_DIR STAGES`: what a batch script executes."""
    path, stages = sys.argv[1:]
    try:
        directory = RunDirectory.open(path)
        code = run_stages(directory, stages, Console(soft_wrap=True), directory.snapshot)
        return _exit_code(directory, code)
    except UserError as error:
        print(f"tango: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if not is_of_disk(error):
            raise
        print(f"tango: {explain_disk(error)}", file=sys.stderr)
        return CheckFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
