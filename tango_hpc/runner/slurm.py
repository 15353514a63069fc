"""Slurm's commands, as few as are needed; none of them needs accounting. Times are Unix seconds.

Of a job there are three answers, not two: what it does, that it has gone, and none (`NoAnswer`, `UNKNOWN`). The
controller may be down or busy for a while, and its silence is not the end of a job.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from tango_hpc.base.errors import UserError

# Slurm's own commands give a controller that is down up some 9 s after they have begun.
ANSWER_SECONDS = 20.0
# The states in which a job is over. In any other, also one that a later Slurm adds, it lives.
FINAL_STATES = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "TIMEOUT",
    }
)  # fmt: skip
# The states of a job that has no processes yet, or none any more, and waits.
WAITING_STATES = frozenset(
    {
        "PENDING", "CONFIGURING", "EXPEDITING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
        "RESV_DEL_HOLD", "SPECIAL_EXIT",
    }
)  # fmt: skip
# Slurm's reasons for the end of a job that was not cancelled by a user (FAIL_* in its job_reason_string).
ENDS_OF_ITS_OWN = frozenset(
    {
        "DeadLine", "InactiveLimit", "JobLaunchFailure", "NodeDown", "NonZeroExitCode", "OutOfMemory", "SystemFailure",
        "TimeLimit",
    }
)  # fmt: skip
# The step of salloc's own shell where a cluster has LaunchParameters=use_interactive_step: no task of anything.
INTERACTIVE_STEP = str(0xFFFF_FFFA)
# Variables that tell how to reach Slurm, and nothing of a job.
SETTINGS = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
# Those by which Slurm gives a job its GPUs.
DEVICES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# The state of a job about which Slurm does not answer.
UNKNOWN = "UNKNOWN"
# A batch script sets this to its job and process id, then becomes `tango` by exec. What is started from there inherits
# the variable, a notebook's shell or another job, but not both ids.
BATCH_MARK = "TANGO_BATCH_PROCESS"
BATCH_MARK_LINE = f'export {BATCH_MARK}="$SLURM_JOB_ID:$$"'


Answer = TypeVar("Answer")


def is_over(state: str) -> bool:
    """Return whether a job in this state has ended; squeue and sacct may add who cancelled it."""
    return state.partition(" ")[0] in FINAL_STATES


def is_alive(state: str | None) -> bool:
    """Return whether a job in this state waits or runs; False where there is none, or Slurm does not answer."""
    return bool(state) and state != UNKNOWN and not is_over(str(state))


class NoAnswer(UserError):
    """Slurm did not say what was asked: neither that a job is there, nor that it has gone."""


def patiently(
    ask: Callable[[], Answer], seconds: float, *, every: float, tell: Callable[[NoAnswer], None] | None = None
) -> Answer:
    """Return the answer of `ask`, asked again every `every` seconds while Slurm is silent, for `seconds` at most.

    `tell` is called with the first silence that is borne with. Raises the last NoAnswer.
    """
    until, told = time.monotonic() + seconds, tell is None
    while True:
        try:
            return ask()
        except NoAnswer as error:
            if time.monotonic() >= until:
                raise
            if tell is not None and not told:
                tell(error)
                told = True
            time.sleep(every)


def run_command(*words: str, check: bool = True) -> str:
    """Return output of a Slurm command.

    Raises UserError with Slurm's own message where it fails and `check` is set, NoAnswer where it takes too long.
    """
    done = _run(words)
    if check and done.returncode != 0:
        raise UserError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def without_job(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `env` without the variables of a job or a step, which sbatch would otherwise pass on.

    A new job that got it would take itself for a task of that step, say.
    """
    return {
        name: value
        for name, value in env.items()
        if name in SETTINGS or not (name.startswith(("SLURM_", "SLURMD_", "SRUN_")) or name in DEVICES)
    }


def submit_after(job: str, script: Path, env: Mapping[str, str]) -> str:
    """Submit a batch script in `env`, to start when `job` has ended, however; the new job.

    Raises UserError where it is refused, NoAnswer where that is not known.
    """
    done = _run(("sbatch", "--parsable", f"--dependency=afterany:{job}", str(script)), env=env)
    match = re.search(r"^(\d+)(?:;\S+)?\s*\Z", done.stdout, re.MULTILINE)  # notes to users may stand before it
    if done.returncode != 0 or match is None:
        raise UserError(f"sbatch: {(done.stderr or done.stdout).strip()}")
    return match.group(1)


def submitted_from(script: Path) -> str | None:
    """Return the newest job of this user in the queue whose batch script was `script`. Raises NoAnswer."""
    done = _run(("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%o"))
    if done.returncode != 0:
        raise NoAnswer(f"Slurm did not answer: {(done.stderr or done.stdout).strip()}")
    jobs = [re.fullmatch(r"(\d+)[^|]*\|(.*)", line.strip()) for line in done.stdout.splitlines()]
    return max((job[1] for job in jobs if job is not None and job[2] == str(script)), key=int, default=None)


def would_take(script: str) -> tuple[bool, str]:
    """Return whether sbatch would accept a batch script, and its words. Raises NoAnswer where it takes too long."""
    done = _run(("sbatch", "--test-only"), script)
    return done.returncode == 0, done.stderr.strip()


def _run(
    words: tuple[str, ...], text: str = "", env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a command that reads `text`, without the user's SQUEUE_* and like defaults, which would hide jobs and
    times.
    """
    env = {name: value for name, value in env.items() if not name.startswith("SQUEUE_")}
    try:
        process = subprocess.Popen(
            words,
            env=env | {"SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # the command is a script on some clusters, and what it starts must end with it
        )
    except FileNotFoundError:
        raise UserError(
            f"the command {words[0]} was not found; is this a Slurm login node? On some clusters: module load slurm"
        ) from None
    with process:
        try:
            output, errors = process.communicate(text, timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"{words[0]} did not answer within {ANSWER_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def is_available() -> bool:
    """Return whether this machine can submit to Slurm."""
    return shutil.which("sbatch") is not None


def job_id(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process runs in, as Slurm's commands want it.

    The last task of an array has SLURM_JOB_ID equal to the array's id: requeueing that would restart all tasks.
    """
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def in_step(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process belongs to a step that srun has started, and is not an allocation's own shell."""
    return env.get("SLURM_STEP_ID", INTERACTIVE_STEP) != INTERACTIVE_STEP


def is_batch_process(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is what the job is for: its batch script was ours and has become this process.

    Else the command was typed into a user's allocation or notebook, which is not ours to end or requeue.
    """
    mark = f"{env.get('SLURM_JOB_ID')}:{os.getpid()}"
    return not in_step(env) and env.get(BATCH_MARK) == mark


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how often the job whose batch process this is was requeued; 0 in any other process."""
    return int(env.get("SLURM_RESTART_COUNT", "0")) if is_batch_process(env) else 0


@dataclass(frozen=True)
class Job:
    """A job as Slurm's controller describes it."""

    job_id: str
    state: str
    reason: str
    end_time: float | None  # by the controller's clock
    time_limit: str
    can_requeue: bool  # a batch job that was submitted with --requeue
    script: str | None  # the batch script, where its file is still there
    was_preempted: bool = False

    @property
    def was_cancelled(self) -> bool:
        """Return whether a user has ended the job: while a job is cleaned up, Slurm names its end only
        indirectly.
        """
        ended_itself = self.was_preempted or self.reason in ENDS_OF_ITS_OWN
        return self.state.startswith("CANCELLED") or (self.state == "COMPLETING" and not ended_itself)

    @property
    def is_alive(self) -> bool:
        """Return whether it is waiting or running."""
        return is_alive(self.state)


def show_job(job: str) -> Job | None:
    """Return the job `job`, or None where the controller has forgotten it. Raises NoAnswer where it does not answer.

    Of a heterogeneous job this is the first component.
    """
    text = _show("job", job)
    line = next((line for line in text.splitlines() if re.match(r"\s*JobId=.*\sJobState=", line)), None)
    if line is None and text:
        raise NoAnswer(f"scontrol show job {job} does not describe a job: {text.strip()[:200]}")
    return None if line is None else parse_job(line)


def node_address(name: str) -> str | None:
    """Return NodeAddr of a node; None where the controller knows none. Raises NoAnswer."""
    match = re.search(r"\bNodeAddr=(\S+)", _show("node", name))
    return match.group(1) if match else None


def _show(kind: str, name: str) -> str:
    """Return the answer of `scontrol show` about one thing; empty where it does not exist. Raises NoAnswer."""
    done = _run(("scontrol", "show", kind, name, "-o"))
    if done.returncode == 0 and "=" in done.stdout:
        return done.stdout
    told = f"{done.stdout}{done.stderr}".strip()
    if re.search(r"invalid job id|not found|no jobs in the system", told, re.IGNORECASE):
        return ""
    raise NoAnswer(f"Slurm did not answer: {told or f'scontrol ended with exit code {done.returncode}'}")


def parse_job(line: str) -> Job:
    """Return one line of `scontrol show job -o`."""
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
    job = fields["JobId"]
    if "ArrayJobId" in fields:
        job = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    return Job(
        job_id=job,
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        end_time=parse_time(fields.get("EndTime", "Unknown")),
        time_limit=fields.get("TimeLimit", ""),
        can_requeue=fields.get("Requeue") == "1" and fields.get("BatchFlag", "0") != "0",
        script=_script(line),
        was_preempted=parse_time(fields.get("PreemptTime", "None")) is not None,
    )


def _script(line: str) -> str | None:
    """Return the file that Command= begins with; the script's arguments follow it, and neither is quoted."""
    match = re.search(r"\sCommand=(.*?) WorkDir=", line)
    words = match.group(1).split(" ") if match else []
    prefixes = (" ".join(words[:count]) for count in range(1, len(words) + 1))
    return next((prefix for prefix in prefixes if Path(prefix).is_file()), None)


def parse_time(text: str) -> float | None:
    """Parse Slurm's local time (2026-01-31T12:00:00) to Unix seconds; None for Unknown, N/A and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def seconds_left(job: str) -> float | None:
    """Return the seconds until Slurm ends `job`, by its controller: clocks of nodes differ, limits are extended.

    None where there is no limit. Raises NoAnswer.
    """
    found = show_job(job)
    if found is None or found.end_time is None:
        return None
    told = run_command("scontrol", "show", "config")
    match = re.search(r"^Configuration data as of (\S+)", told, re.MULTILINE)
    now = parse_time(match.group(1)) if match else None
    if now is None:
        raise NoAnswer("scontrol show config does not tell the controller's time")
    return found.end_time - now


def kill_steps(job: str, name: str) -> None:
    """Send SIGKILL to every task of the steps of `job` with this `name`. Raises UserError where that fails."""
    listed = run_command("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i %j")
    for line in listed.splitlines():
        step, _, step_name = line.strip().partition(" ")
        if step_name == name:
            run_command("scancel", "--signal=KILL", step)


def end_this_step() -> None:
    """Have Slurm end the step that this process is a task of, if it is one; where it does not answer the step stays."""
    if in_step():
        with suppress(UserError):
            run_command("scancel", f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}", check=False)


def queue(jobs: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """(state, reason) of those of `jobs` (id: its owner's uid) that Slurm knows, by job id; waiting array tasks
    included.

    A job that is missing from the answer has gone. The state is `UNKNOWN`, and the reason why, for all of them where
    Slurm does not answer, and for other people's where it may hide them.
    """
    if not jobs:
        return {}
    if shutil.which("squeue") is None:
        return dict.fromkeys(jobs, (UNKNOWN, "there is no Slurm here to ask"))
    users = {os.getuid(), *jobs.values()}
    # One unknown id among several is an error to squeue, so all jobs of these users are listed instead.
    named = [f"--user={','.join(map(str, sorted(users)))}"] if all(map(_has_name, users)) else []
    words = ("squeue", "--noheader", *named, "--array", "--states=all", "--format=%i|%T|%r")
    try:
        done = _run(words)
        if done.returncode != 0:
            raise NoAnswer(f"Slurm did not answer: {(done.stderr or done.stdout).strip()}")
        found: dict[str, tuple[str, str]] = {}
        for line in done.stdout.splitlines():
            listed, _, rest = line.strip().partition("|")
            job = listed.partition("+")[0]  # 7+0, 7+1: the components of a heterogeneous job
            if job in jobs and rest and not is_alive(found.get(job, ("", ""))[0]):
                state, _, reason = rest.partition("|")
                found[job] = (state, reason)
        others = [job for job in jobs if job not in found and jobs[job] != os.getuid()]
        if others and os.getuid() != 0 and _hides_jobs():
            found |= dict.fromkeys(others, (UNKNOWN, "this cluster shows nobody the jobs of others"))
        return found
    except NoAnswer as error:
        return dict.fromkeys(jobs, (UNKNOWN, str(error)))


def _has_name(uid: int) -> bool:
    try:
        return bool(pwd.getpwuid(uid))
    except KeyError:
        return False


def _hides_jobs() -> bool:
    match = re.search(r"^PrivateData\s*=(.*)$", run_command("scontrol", "show", "config", check=False), re.MULTILINE)
    return match is not None and "jobs" in match.group(1)


def accounting(job: str) -> str | None:
    """Return the state that `sacct` remembers of `job`; None where there is no accounting or it does not know
    the job.
    """
    if shutil.which("sacct") is None:
        return None
    try:
        text = run_command("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job, check=False)
    except NoAnswer:
        return None
    states = re.findall(r"^([A-Z_]+)(?: by \d+)?\s*$", text, re.MULTILINE)
    return states[-1] if states else None
