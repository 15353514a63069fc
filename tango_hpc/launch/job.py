"""One attempt of a run, wherever it runs: the same function under `tango train`, plain sbatch, submitit and salloc.

Inside a Slurm job the ranks go through srun. When they have saved because the machine is taken away (time limit,
preemption, SIGTERM), the job requeues itself and the next attempt continues; when somebody asked for the end
(`tango stop`, scancel), it does not. A failure is tried again only if this attempt got somewhere.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import NoReturn

from rich.console import Console

from tango_hpc.config import Config, load_config
from tango_hpc.control.outcome import STOPPED
from tango_hpc.control.stop import read_stop_request
from tango_hpc.errors import CheckFailed, StoppedEarly, UserError
from tango_hpc.files import explain_full, is_full
from tango_hpc.launch import slurm
from tango_hpc.launch.attempts import Attempt, AttemptLog, submitted_jobs
from tango_hpc.launch.continuity import compare_with_last, refuse
from tango_hpc.launch.enter import is_done
from tango_hpc.launch.environment import place
from tango_hpc.launch.lock import RunLock
from tango_hpc.launch.provenance import record_attempt
from tango_hpc.launch.starters import LocalStarter, SrunStarter, Starter
from tango_hpc.launch.supervisor import Supervisor
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.summary import read_summary, update_summary
from tango_hpc.stages.preflight import check_inputs
from tango_hpc.stages.processes import process_roles

NEVER_RETRY = (0, UserError.exit_code, CheckFailed.exit_code)


def run_attempt(
    directory: RunDirectory, stage: str, config: Config, console: Console, held: RunLock | None = None
) -> int:
    """Run `stage` from its last checkpoint and return the exit code; a batch job may requeue itself instead.

    `held` is the run's lock where the caller has it.
    """
    if is_done(directory, stage):
        say(console, f"{stage} in {directory.path} is done already.")
        return 0
    job = slurm.job_id()
    log = AttemptLog(directory)
    with nullcontext(held) if held is not None else RunLock(directory) as lock:
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        asked = read_stop_request(directory)
        if restarts and asked is not None and asked.by == "user":
            say(console, f"{asked.why}: not started again. Continue with: {resume_command(directory, stage)}")
            return STOPPED
        directory.stop_file.unlink(missing_ok=True)
        attempt = log.start(stage)
        limit = config.launch.max_attempts_without_progress
        if job is not None and restarts and log.without_progress(stage, job) > limit:
            reason = (
                f"given up: {limit} attempts of job {job} in a row ended without a new checkpoint "
                "(launch.max_attempts_without_progress)"
            )
            _note_failure(directory, log, attempt, 1, reason)
            say(console, f"{reason}. Continue with: {resume_command(directory, stage)}")
            return 1
        computes_with, refused = compare_with_last(directory, stage, config)
        record_attempt(directory, stage=stage, record_diff=config.run.record_diff, computes_with=computes_with)
        try:
            check_inputs(config, stage)  # as this machine sees them, and what the stage before has written
            refuse(directory, refused)
            supervisor = Supervisor(
                directory,
                config,
                process_roles(config, stage),
                _starter(directory, stage, config),
                console,
                deadline=deadline(job),
                on_poll=lock.touch,
            )
            code = supervisor.run()
        except UserError as error:
            _note_failure(directory, log, attempt, error.exit_code, str(error))
            raise
        with _telling_failure(console):
            log.end(attempt, code, supervisor.reason)
        if not supervisor.stopped_by_user:
            directory.stop_file.unlink(missing_ok=True)
        if code == 0:
            return 0
        if code != STOPPED:
            with _telling_failure(console):
                update_summary(directory, stage, "failed", attempt_seconds=(attempt.ended or 0) - attempt.started)
        if code not in NEVER_RETRY and not supervisor.stopped_by_user and job is not None:
            if supervisor.request is None and not attempt.made_progress:
                say(console, "Not tried again: this attempt made no progress.")
            elif (found := slurm.show_job(job)) is not None and found.state in ("PENDING", "REQUEUED"):
                say(console, f"Slurm has requeued job {job}; it continues from the last checkpoint.")
                _leave(lock, code)
            elif found is None or found.state != "RUNNING":  # it is being cancelled, say
                say(console, f"Not requeued: job {job} is {found.state if found else 'unknown'}.")
            elif not found.can_requeue:
                say(console, f"Not requeued: job {job} was not submitted with --requeue.")
            else:
                say(console, f"Requeueing job {job}; it continues from the last checkpoint.")
                slurm.run_command("scontrol", "requeue", job)
                _leave(lock, code)
        if code == STOPPED:
            say(console, f"Continue with: {resume_command(directory, stage)}")
        else:
            say(console, f"Logs of the ranks: {directory.logs}")
        return code


@contextmanager
def _telling_failure(console: Console) -> Iterator[None]:
    """What cannot be written down is said, and how the attempt ended goes on as it is."""
    try:
        yield
    except OSError as error:
        say(console, f"not written down: {explain_full(error) if is_full(error) else error}")


def _note_failure(directory: RunDirectory, log: AttemptLog, attempt: Attempt, code: int, reason: str) -> None:
    """For `tango status` and `tango logs`: the attempt ended before any rank was started."""
    log.end(attempt, code, reason)
    update_summary(directory, attempt.stage, "failed")


def run_stages(directory: RunDirectory, stages: str, console: Console) -> int:
    """Run "sft,train" and the like, one after the other, until one does not end with 0."""
    try:
        config = load_config(directory.config)
    except UserError as error:  # a folder that this machine does not see, say
        log = AttemptLog(directory)
        _note_failure(directory, log, log.start(stages.partition(",")[0]), error.exit_code, str(error))
        raise
    code = 0
    for stage in stages.split(","):
        code = run_attempt(directory, stage, config, console)
        if code != 0:
            break
    return code


def run_job(run_dir: str, stages: str) -> dict:
    """What a submitted job runs (submitit pickles the arguments, nothing else); returns the run's summary.

    Raises `StoppedEarly` where the run was stopped for good, and RuntimeError where it failed.
    """
    directory = RunDirectory.open(run_dir)
    code = run_stages(directory, stages, Console(soft_wrap=True))
    if code == STOPPED:
        raise StoppedEarly(f"saved; continue with: {resume_command(directory, stages)}")
    if code != 0:
        raise RuntimeError(f"{stages} in {run_dir} failed with exit code {code}; see `tango logs {run_dir}`")
    return read_summary(directory)


def _starter(directory: RunDirectory, stage: str, config: Config) -> Starter:
    where = place(os.environ, config.world_size)
    assert where != "rank", "ranks do not supervise"
    if where == "alone":
        return LocalStarter(directory, stage, config)
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes < config.launch.nodes:
        raise UserError(
            f"launch.nodes is {config.launch.nodes}, but job {slurm.job_id()} has {nodes}; "
            f"ask for --nodes={config.launch.nodes}"
        )
    return SrunStarter(directory, stage, config)


def deadline(job: str | None, env: Mapping[str, str] = os.environ) -> float | None:
    """When Slurm ends this job, in Unix seconds; None where there is no job or no limit."""
    if job is None:
        return None
    if "SLURM_JOB_END_TIME" in env:
        return float(env["SLURM_JOB_END_TIME"])
    found = slurm.show_job(job)
    return found.end_time if found else None


def _leave(lock: RunLock, code: int) -> NoReturn:
    """End this process now: after a requeue Slurm kills it anyway, and nothing may report a result any more."""
    lock.release()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)
    os._exit(code)


def resume_command(directory: RunDirectory, stages: str) -> str:
    """The command that continues this run in the way in which it was started last."""
    words = ["tango", stages, str(directory.config), "--resume"]
    if slurm.job_id() is not None:
        words.insert(1, "submit")
        for entry in submitted_jobs(directory)[-1:]:
            words[2] = entry["stages"]
            words += ["--profile", entry["profile"]] if entry["profile"] is not None else []
    return shlex.join(words)


def say(console: Console, message: str) -> None:
    """Print `message` as it is: no markup, no colours, no line breaks that would spoil copying."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    """`python -m tango_hpc.launch.job RUN_DIR STAGES`: what a batch script executes."""
    path, stages = sys.argv[1:]
    try:
        return run_stages(RunDirectory.open(path), stages, Console(soft_wrap=True))
    except UserError as error:
        print(f"tango: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if not is_full(error):
            raise
        print(f"tango: {explain_full(error)}", file=sys.stderr)
        return CheckFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
