"""The end of an unfinished attempt: requeue the job, or tell the user how to continue."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import submitted_jobs
from tango_hpc.runner.stop import read_stop_request

RETRY_SECONDS = 5.0
# Where the job has no end, or none is known.
PATIENCE_SECONDS = 3600.0
# The job is killed at its end; what is to be said then must be said before.
LAST_SECONDS = 5.0
# Slurm knows the job to be running, and refuses all the same.
MAX_REFUSALS = 5
# Options of sbatch, by the variable in which a job finds their values.
SBATCH_OPTIONS = {
    "nodes": "SLURM_JOB_NUM_NODES", "ntasks-per-node": "SLURM_NTASKS_PER_NODE", "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "gpus-per-node": "SLURM_GPUS_PER_NODE", "gpus-per-task": "SLURM_GPUS_PER_TASK", "gpu-bind": "SLURM_GPU_BIND",
    "mem": "SLURM_MEM_PER_NODE", "mem-per-cpu": "SLURM_MEM_PER_CPU", "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT", "qos": "SLURM_JOB_QOS",
}  # fmt: skip


def requeue(
    job: str,
    directory: RunDirectory,
    seconds_left: float | None,
    *,
    say: Callable[[str], None],
    wait: Callable[[float], None],
    command: str,
) -> bool:
    """Have Slurm start `job` again; whether it will. What it answers nothing to is tried again until the job's end.

    `wait` passes so many seconds; `command` continues the run by hand.
    """
    patience = PATIENCE_SECONDS if seconds_left is None else max(seconds_left - LAST_SECONDS, 0.0)
    until = time.monotonic() + patience
    refusals = 0
    problem = ""
    while True:
        asked = read_stop_request(directory)
        if asked is not None and asked.by == "user":
            say(f"Not requeued: {asked.why}.")
            return False
        known_to_run = False
        try:
            found = slurm.show_job(job)
            if found is not None and found.state in slurm.WAITING_STATES:
                say(f"Slurm has requeued job {job}; it continues from the last checkpoint.")
                return True
            if found is None or found.state != "RUNNING":  # it is being cancelled, say
                say(f"Not requeued: job {job} is {found.state if found else 'not known to Slurm any more'}.")
                return False
            if not found.can_requeue:
                say(f"Not requeued: job {job} was not submitted with --requeue.")
                return False
            known_to_run = True
            if not problem:
                say(f"Requeueing job {job}; it continues from the last checkpoint.")
            slurm.run_command("scontrol", "requeue", job)
            return True
        except UserError as error:
            refusals += known_to_run
            left = until - time.monotonic()
            if left < 0 or refusals >= MAX_REFUSALS:
                say(f"Not requeued: {error}")
                return False
            if not problem:
                say(
                    f"Not requeued yet: {error}. Tried again for {left:.0f} s. "
                    f"Should job {job} not come back, continue with: {command}"
                )
            problem = str(error)
        wait(min(RETRY_SECONDS, max(until - time.monotonic(), 0.1)))


def resume_command(directory: RunDirectory, stages: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the command that continues this run in the way in which it was started last.

    Of a job that was submitted: `tango submit` with the same profile. Of one by plain sbatch: sbatch with the same
    script and the options that the job has, as far as the job's variables tell. Else, in an allocation too, `tango`.
    """
    config = str(directory.config)
    job = slurm.job_id(env)
    if job is None or not slurm.is_batch_process(env):
        return shlex.join(["tango", stages, config, "--resume"])
    for entry in submitted_jobs(directory):
        if entry["job"] == job:
            profile = ["--profile", entry["profile"]] if entry["profile"] is not None else []
            return shlex.join(["tango", "submit", entry["stages"], config, "--resume", *profile])
    options = [f"--{option}={env[name]}" for option, name in SBATCH_OPTIONS.items() if env.get(name)]
    words = shlex.join(["sbatch", *options, _batch_script(job), config, "--resume"])
    stage = f"STAGE={env['STAGE']} " if env.get("STAGE") else ""  # of slurm/train.sbatch
    return f"{stage}{words}  # and what else you had given to sbatch, such as --time"


def _batch_script(job: str) -> str:
    """Return the file of the job's batch script; the package's, where Slurm does not name it or it has been moved."""
    try:
        found = slurm.show_job(job)
    except UserError:
        found = None
    return found.script if found is not None and found.script is not None else "slurm/train.sbatch"
