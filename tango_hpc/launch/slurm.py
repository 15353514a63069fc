"""Slurm's commands, as few as are needed; none of them needs accounting. Times are Unix seconds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from tango_hpc.errors import UserError

COMMAND_TIMEOUT_SECONDS = 60
# States of a job that has not come to its end.
ALIVE_STATES = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STOPPED"}
)


def run_command(*words: str, check: bool = True) -> str:
    """Output of a Slurm command. Raises UserError with Slurm's own message where it fails and `check` is set."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f"the command {words[0]} was not found; is this a Slurm login node? On some clusters: module load slurm"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{words[0]} did not answer within {COMMAND_TIMEOUT_SECONDS} s; is Slurm's controller up?"
        ) from None
    if check and done.returncode != 0:
        raise UserError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def is_available() -> bool:
    """Whether this machine can submit to Slurm."""
    return shutil.which("sbatch") is not None


def job_id(env: Mapping[str, str] = os.environ) -> str | None:
    """The job that this process runs in, as Slurm's commands want it.

    The last task of an array has SLURM_JOB_ID equal to the array's id: requeueing that would restart all tasks.
    """
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


@dataclass(frozen=True)
class Job:
    """What the controller says of one job."""

    job_id: str
    state: str
    reason: str
    end_time: float | None
    can_requeue: bool  # a batch job that was submitted with --requeue

    @property
    def is_alive(self) -> bool:
        """Whether it is waiting or running."""
        return self.state in ALIVE_STATES


def show_job(job: str) -> Job | None:
    """The job `job`, or None where the controller has forgotten it."""
    text = run_command("scontrol", "show", "job", job, "-o", check=False)
    return parse_job(text.splitlines()[0]) if "JobState=" in text else None


def parse_job(line: str) -> Job:
    """One line of `scontrol show job -o`."""
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
    job = fields["JobId"]
    if "ArrayJobId" in fields:
        job = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    return Job(
        job_id=job,
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        end_time=parse_time(fields.get("EndTime", "Unknown")),
        can_requeue=fields.get("Requeue") == "1" and fields.get("BatchFlag") == "1",
    )


def parse_time(text: str) -> float | None:
    """Slurm's local time (2026-01-31T12:00:00) as Unix seconds; None for Unknown, N/A and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def queue(jobs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(state, reason) of those of `jobs` that are in the queue, by job id; array tasks that still wait included."""
    wanted = list(jobs)
    if not wanted or shutil.which("squeue") is None:
        return {}
    # One unknown id among several is an error to squeue, so all of the user's jobs are listed instead.
    text = run_command("squeue", "--noheader", "--me", "--array", "--states=all", "--format=%i|%T|%r", check=False)
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        job, state, reason = line.strip().split("|", 2)
        if job in wanted:
            found[job] = (state, reason)
    return found


def accounting(job: str) -> str | None:
    """The state that `sacct` remembers of `job`; None where there is no accounting or it does not know the job."""
    if shutil.which("sacct") is None:
        return None
    text = run_command("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job, check=False)
    states = [line.strip() for line in text.splitlines() if line.strip()]
    return states[-1].split()[0] if states else None
