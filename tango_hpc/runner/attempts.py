"""The attempts of a run: how each ended, and whether it made progress.

In RUN/control/, `jobs.json` lists the jobs that were submitted, and `attempts.jsonl` gets a line when an attempt starts
and another when it ends.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from tango_hpc.base.files import (
    append_line,
    read_json_lines,
    read_replaced,
    set_aside,
    warn_once,
    write_atomically,
)
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.step_names import StepName, is_newer, steps_in
from tango_hpc.base.run.weights_alone import is_whole
from tango_hpc.runner import slurm
from tango_hpc.runner.lock import Process
from tango_hpc.runner.program import Program


@dataclass
class Attempt:
    """One start of one stage. The end is missing while the attempt runs, and for ever if its node was lost."""

    number: int
    stage: str
    host: str
    job: str | None  # Slurm's job id
    started: float  # Unix seconds
    saved_before: str | None  # `Program.progress` at the start; after the end, the checkpoint that it went on from
    log: str | None = None  # the file that the supervisor's output goes to
    ended: float | None = None
    code: int | None = None
    reason: str = ""
    saved_after: str | None = None
    own_job: bool = (
        True  # the job was submitted for this run; else the run started inside a user's allocation or notebook
    )
    program: Program | None = None  # in the process that started it; not written

    @property
    def made_progress(self) -> bool:
        """Return whether the attempt left a newer checkpoint, or more results."""
        return self.ended is not None and self.is_progress(self.saved_after)

    def is_progress(self, saved: str | None) -> bool:
        """Return whether `saved` (`Program.progress`) is more than the attempt went on from."""
        if any(text is not None and StepName.read(text) for text in (saved, self.saved_before)):
            return is_newer(saved, self.saved_before)
        return saved != self.saved_before

    def went_on_from(self, taken: str | None) -> None:
        """Record that the ranks took an older checkpoint than the newest, which was damaged."""
        if taken is not None and is_newer(self.saved_before, taken):
            self.saved_before = taken


def newest_checkpoint(directory: RunDirectory, stage: str) -> str | None:
    """Return the name of the newest checkpoint of `stage` that a run can go on from."""
    for name, path in reversed(steps_in(directory.checkpoints / stage)):
        if is_whole(path):
            return str(name)
    return None


Number = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-1e11, lt=1e11)]  # seconds until the year 5138
Name = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.+-]{1,64}$")]
Text = Annotated[str, Field(strict=True)]
Printable = Annotated[str, Field(strict=True, pattern=r"^[^\x00]*$")]


class AttemptLine(BaseModel):
    """A line of attempts.jsonl, with the fields that it has."""

    number: Number = 0
    stage: Text = ""
    host: Text = ""
    job: Name | None = None
    started: Number = 0
    saved_before: Text | None = None
    log: Text | None = None
    ended: Number | None = None
    code: Number | None = None
    reason: Text = ""
    saved_after: Text | None = None
    own_job: Annotated[bool, Field(strict=True)] = True

    @classmethod
    def fields_of(cls, line: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a line that have values of their kind; damaged ones are left out."""
        known = {name: value for name, value in line.items() if name in cls.model_fields}
        try:
            cls.model_validate(known)
        except ValidationError as error:
            damaged = {item["loc"][0] for item in error.errors()}
            return {name: value for name, value in known.items() if name not in damaged}
        return known


class JobEntry(BaseModel):
    """A job in jobs.json, as far as it is checked; `submitted_jobs` names the other keys."""

    job: Name
    stages: Printable
    cluster: Printable
    log: Printable
    submitted: Number
    profile: Text | None = None
    after: Text | None = None
    unwanted: Text | None = None


class AttemptLog:
    """The file control/attempts.jsonl."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file = directory.attempts_file

    def read(self) -> list[Attempt]:
        """Return all attempts of which a whole line is left, the oldest first."""
        attempts: dict[int, Attempt] = {}
        for line in read_json_lines(self._file):
            data = AttemptLine.fields_of(line)
            if data.get("number") in attempts:
                for name, value in data.items():
                    setattr(attempts[data["number"]], name, value)
            elif data.keys() >= {"number", "stage", "host", "job", "started", "saved_before"}:
                attempts[data["number"]] = Attempt(**data)
        return list(attempts.values())

    def start(self, program: Program) -> Attempt:
        """Record the start of an attempt at `program`."""
        attempt = Attempt(
            number=max((attempt.number for attempt in self.read()), default=0) + 1,
            stage=program.name,
            host=socket.gethostname(),
            job=slurm.job_id(),
            started=time.time(),
            saved_before=program.progress(self._directory),
            log=_own_log(),
            own_job=slurm.is_batch_process(),
            program=program,
        )
        self._append({name: getattr(attempt, name) for name in AttemptLine.model_fields})
        return attempt

    def end(self, attempt: Attempt, code: int, reason: str) -> None:
        """Record the end of an attempt that `start` returned."""
        assert attempt.program is not None, "only who started an attempt ends it"
        attempt.ended, attempt.code, attempt.reason = time.time(), code, reason
        attempt.saved_after = attempt.program.progress(self._directory)
        attempt.went_on_from(attempt.saved_after)  # that it was set aside may be all that is known
        names = ("number", "ended", "code", "reason", "saved_before", "saved_after")
        self._append({name: getattr(attempt, name) for name in names})

    def without_progress(self, program: Program, jobs: Collection[str]) -> int:
        """Return how many starts of `jobs` in a row, up to the last one, found saved what is saved now."""
        saved = program.progress(self._directory)
        count = 0
        for attempt in reversed(self.read()):
            if (attempt.stage, attempt.saved_before) != (program.name, saved) or attempt.job not in jobs:
                break
            count += 1
        return count

    def _append(self, data: dict[str, Any]) -> None:
        append_line(self._file, json.dumps(data))


def remember_job(directory: RunDirectory, stages: str, cluster: str, job: Any, profile: str | None) -> None:
    """Add submitit's `job`, and the name or file of the profile that it was submitted with, to jobs.json."""
    process = Process.of(int(job.job_id)) if cluster == "local" else None
    if profile is not None and Path(profile).is_file():
        profile = str(Path(profile).absolute())
    entry = {
        "job": job.job_id,
        "stages": stages,
        "cluster": cluster,
        "profile": profile,
        "submitted": time.time(),
        "log": str(job.paths.stdout),
        "process": asdict(process) if process else None,
    }
    _write_jobs(directory, [*submitted_jobs(directory), entry])


def remember_next_job(directory: RunDirectory, job: str, before: dict[str, Any], log: Path) -> None:
    """Add `job`, which continues the run when the job of the entry `before` has ended."""
    entry = before | {"job": job, "submitted": time.time(), "log": str(log), "after": before["job"]}
    _write_jobs(directory, [*submitted_jobs(directory), entry])


def forget_job(directory: RunDirectory, job: str) -> None:
    """Remove a job that was cancelled before its start."""
    _write_jobs(directory, [entry for entry in submitted_jobs(directory) if entry["job"] != job])


def mark_unwanted(directory: RunDirectory, job: str, why: str) -> None:
    """Record that `job` is to do nothing if it starts."""
    marked = [entry | ({"unwanted": why} if entry["job"] == job else {}) for entry in submitted_jobs(directory)]
    _write_jobs(directory, marked)


def _write_jobs(directory: RunDirectory, entries: list[dict[str, Any]]) -> None:
    """Write jobs.json. A damaged file is set aside, because the jobs that cannot be read from it may still wait."""
    if _read_jobs(directory)[1] and directory.jobs_file.is_file():
        set_aside(directory.jobs_file)
    write_atomically(directory.jobs_file, json.dumps(entries, indent=2) + "\n")


def next_job(directory: RunDirectory, job: str) -> str | None:
    """Return the job that follows `job` in a chain (`requeue: chain`)."""
    return next((entry["job"] for entry in submitted_jobs(directory) if entry.get("after") == job), None)


def chain_before(directory: RunDirectory, job: str) -> list[str]:
    """Return the jobs before `job` in its chain, the last one first; an empty list for a job of no chain."""
    after = {entry["job"]: entry.get("after") for entry in submitted_jobs(directory)}
    found: list[str] = []
    while (before := after.get(found[-1] if found else job)) is not None and before not in found:
        found.append(before)
    return found


def submitted_jobs(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the jobs that were submitted for this run, the oldest first.

    Keys: job, stages, cluster, profile, submitted, log; process (`lock.Process`) for a job on this machine; after, the
    job that it waits for in a chain.
    """
    jobs, damage = _read_jobs(directory)
    if damage:
        warn_once(f"{directory.jobs_file} is damaged{damage}")
    return jobs


def _read_jobs(directory: RunDirectory) -> tuple[list[dict[str, Any]], str]:
    """Return the jobs in jobs.json, and a description of what is damaged in the file, or ""."""
    try:
        entries = json.loads(read_replaced(directory.jobs_file))
    except (FileNotFoundError, NotADirectoryError):
        return [], ""
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        return [], " and passed over: jobs that wait are not known here"
    jobs = [{"profile": None} | entry for entry in entries if _is_job(entry)]
    num_passed = len(entries) - len(jobs)
    return jobs, f": {num_passed} of its jobs passed over" if num_passed else ""


def _is_job(entry: Any) -> bool:
    try:
        JobEntry.model_validate(entry)
    except ValidationError:
        return False
    return True


def submitted_process(entry: dict[str, Any]) -> Process:
    """Return the process of a job in the background of this machine; for other jobs a process that never existed."""
    return Process.noted(entry.get("process"))


def known_jobs(directory: RunDirectory) -> list[str]:
    """Return Slurm's ids of this run's own jobs, submitted or recorded by an attempt, the oldest first."""
    submitted = [entry["job"] for entry in submitted_jobs(directory) if entry["cluster"] == "slurm"]
    started = [attempt.job for attempt in AttemptLog(directory).read() if attempt.job is not None and attempt.own_job]
    return list(dict.fromkeys([*submitted, *started]))


def _own_log() -> str | None:
    """Return the file that this process prints to, if it prints to a file; plain sbatch lets the user choose it."""
    output = Path("/proc/self/fd/1")
    return str(output.resolve()) if output.is_file() else None
