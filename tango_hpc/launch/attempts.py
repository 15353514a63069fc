"""The attempts of a run: who has it now, how earlier ones ended, and whether they got anywhere.

RUN/control/: `lock` says who runs here; `jobs.json` what was submitted; `attempts.jsonl` has one line when an attempt
starts and one when it ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tango_hpc.errors import UserError
from tango_hpc.files import write_atomically
from tango_hpc.launch import slurm
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.steps import steps_in

LOCK_TOUCH_SECONDS = 10.0
LOCK_STALE_SECONDS = 120.0


@dataclass
class Attempt:
    """One start of one stage. Ends are missing while it runs, and for ever where its node was lost."""

    number: int
    stage: str
    host: str
    job: str | None  # Slurm's job id
    started: float  # Unix seconds
    saved_before: str | None  # the newest checkpoint when it started
    log: str | None = None  # the file that the supervisor's output goes to
    ended: float | None = None
    code: int | None = None
    reason: str = ""
    saved_after: str | None = None
    own_job: bool = True  # the job is there for this run; else the run was started in somebody's allocation or notebook

    @property
    def made_progress(self) -> bool:
        """Whether it left a newer checkpoint."""
        return self.ended is not None and self.saved_after != self.saved_before


def newest_checkpoint(directory: RunDirectory, stage: str) -> str | None:
    """Name of the newest complete checkpoint of `stage`."""
    complete = steps_in(directory.checkpoints / stage)
    return str(complete[-1][0]) if complete else None


class AttemptLog:
    """Reads and writes control/attempts.jsonl."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file = directory.attempts_file

    def read(self) -> list[Attempt]:
        """All attempts, the oldest first. A line that a full disk or a dying node left torn is passed over, with a warning."""
        attempts: dict[int, Attempt] = {}
        if not self._file.is_file():
            return []
        for place, line in enumerate(self._file.read_bytes().splitlines(), start=1):
            try:
                data = json.loads(line)
                if data["number"] in attempts:
                    for name, value in data.items():
                        setattr(attempts[data["number"]], name, value)
                else:
                    attempts[data["number"]] = Attempt(**data)
            except (ValueError, TypeError, KeyError):
                _warn(f"{self._file}, line {place} is torn and passed over: what became of one attempt is not known")
        return list(attempts.values())

    def start(self, stage: str) -> Attempt:
        """Note the start of an attempt."""
        attempt = Attempt(
            number=max((attempt.number for attempt in self.read()), default=0) + 1,
            stage=stage,
            host=socket.gethostname(),
            job=slurm.job_id(),
            started=time.time(),
            saved_before=newest_checkpoint(self._directory, stage),
            log=_own_log(),
            own_job=slurm.is_batch_process(),
        )
        self._append(asdict(attempt))
        return attempt

    def end(self, attempt: Attempt, code: int, reason: str) -> None:
        """Note how it ended."""
        attempt.ended, attempt.code, attempt.reason = time.time(), code, reason
        attempt.saved_after = newest_checkpoint(self._directory, attempt.stage)
        names = ("number", "ended", "code", "reason", "saved_after")
        self._append({name: getattr(attempt, name) for name in names})

    def without_progress(self, stage: str, job: str) -> int:
        """How many starts of `job` in a row, up to the last one, found the checkpoint that is the newest now."""
        saved = newest_checkpoint(self._directory, stage)
        count = 0
        for attempt in reversed(self.read()):
            if (attempt.stage, attempt.job, attempt.saved_before) != (stage, job, saved):
                break
            count += 1
        return count

    def _append(self, data: dict[str, Any]) -> None:
        with self._file.open("ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            torn = file.read(1) not in (b"", b"\n")  # by a write that came to no end; it spoils its own line only
            file.write(b"\n" * torn + json.dumps(data).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@cache
def _warn(text: str) -> None:
    """Say it once, however often the file is read."""
    print(f"tango: warning: {text}", file=sys.stderr)


def remember_job(directory: RunDirectory, stages: str, cluster: str, job: Any, profile: str | None) -> None:
    """Add submitit's `job`, submitted with the profile of that name or file, to RUN/control/jobs.json."""
    if profile is not None and Path(profile).is_file():
        profile = str(Path(profile).absolute())
    entry = {
        "job": job.job_id,
        "stages": stages,
        "cluster": cluster,
        "profile": profile,
        "submitted": time.time(),
        "log": str(job.paths.stdout),
    }
    write_atomically(directory.jobs_file, json.dumps([*submitted_jobs(directory), entry], indent=2) + "\n")


def submitted_jobs(directory: RunDirectory) -> list[dict[str, Any]]:
    """The jobs that were submitted for this run, the oldest first: job, stages, cluster, profile, submitted, log."""
    return json.loads(directory.jobs_file.read_text()) if directory.jobs_file.exists() else []


def known_jobs(directory: RunDirectory) -> list[str]:
    """Slurm's ids of this run's own jobs, submitted or noted by an attempt, the oldest first."""
    submitted = [entry["job"] for entry in submitted_jobs(directory) if entry["cluster"] == "slurm"]
    started = [attempt.job for attempt in AttemptLog(directory).read() if attempt.job is not None and attempt.own_job]
    return list(dict.fromkeys([*submitted, *started]))


def _own_log() -> str | None:
    """The file that this process prints to, if it is one; plain sbatch puts it where the user said."""
    output = Path("/proc/self/fd/1")
    return str(output.resolve()) if output.is_file() else None


class RunLock:
    """Keeps two supervisors from one run directory; a context manager. Call `touch` every now and then."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file = directory.lock_file
        self._touched = 0.0

    def __enter__(self) -> RunLock:
        mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": slurm.job_id()})
        try:
            with self._file.open("x") as file:
                file.write(mine)
        except FileExistsError:
            check_lock(self._directory)
            write_atomically(self._file, mine)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)

    def touch(self) -> None:
        """Show that the holder is there."""
        if time.monotonic() - self._touched > LOCK_TOUCH_SECONDS:
            self._touched = time.monotonic()
            self._file.touch()


def lock_holder(directory: RunDirectory) -> dict[str, Any]:
    """Host, pid and Slurm job of who runs in the directory, or ran there when it was killed; empty for nobody."""
    return json.loads(directory.lock_file.read_text() or "{}") if directory.lock_file.exists() else {}


def check_lock(directory: RunDirectory) -> None:
    """Raise UserError where somebody runs in the directory."""
    holder = lock_holder(directory)
    if holder and _is_alive(holder, directory.lock_file):
        who = f"Slurm job {holder['job']}" if holder.get("job") else f"process {holder.get('pid')}"
        raise UserError(
            f"{who} on {holder.get('host')} is running in {directory.path}; end it with `tango stop` or `tango cancel`, "
            "or give another run.dir"
        )


def _is_alive(holder: dict[str, Any], lock: Path) -> bool:
    job = holder.get("job")
    if holder.get("host") == socket.gethostname() and holder.get("pid") is not None:
        return Path(f"/proc/{holder['pid']}").exists()
    if job is not None and job == slurm.job_id():
        return False  # this job, on another node before it was requeued
    if job is not None and slurm.is_available():
        found = slurm.show_job(job)
        return found is not None and found.state in ("RUNNING", "COMPLETING", "SUSPENDED")
    # Another machine: compare with a file of the same file server, whose clock may differ from ours.
    probe = lock.with_name("clock")
    probe.touch()
    return probe.stat().st_mtime - lock.stat().st_mtime < LOCK_STALE_SECONDS
