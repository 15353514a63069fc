"""The attempts of a run: how they ended, and whether they got anywhere.

RUN/control/: `jobs.json` says what was submitted; `attempts.jsonl` has one line when an attempt starts and one when it
ends.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tango_hpc.base.files import (
    append_line,
    is_number,
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
from tango_hpc.runner.lock import NAME, Process
from tango_hpc.runner.program import Program


@dataclass
class Attempt:
    """One start of one stage. Ends are missing while it runs, and for ever where its node was lost."""

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
    own_job: bool = True  # the job is there for this run; else the run was started in somebody's allocation or notebook
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
        """Note that its ranks took an older checkpoint than the newest, which was damaged."""
        if taken is not None and is_newer(self.saved_before, taken):
            self.saved_before = taken


def newest_checkpoint(directory: RunDirectory, stage: str) -> str | None:
    """Return the name of the newest checkpoint of `stage` that a run can go on from."""
    for name, path in reversed(steps_in(directory.checkpoints / stage)):
        if is_whole(path):
            return str(name)
    return None


_WRITTEN = [field.name for field in fields(Attempt) if field.name != "program"]
_NUMBERS = ("number", "started", "ended", "code")
_MOST = 1e11  # seconds since 1970: the year 5138
_OPTIONAL = ("job", "saved_before", "saved_after", "log", "ended", "code")


def _fits(name: str, value: Any) -> bool:
    """Whether a value of attempts.jsonl is of its kind."""
    if name == "own_job":
        return isinstance(value, bool)
    if value is None:
        return name in _OPTIONAL
    if name in _NUMBERS:
        return _fits_number(value)
    return isinstance(value, str) and (name != "job" or NAME.fullmatch(value) is not None)


def _fits_number(value: Any) -> bool:
    """Whether it can be a count, an exit code or a time."""
    return is_number(value) and abs(value) < _MOST


class AttemptLog:
    """Reads and writes control/attempts.jsonl."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file = directory.attempts_file

    def read(self) -> list[Attempt]:
        """All attempts of which a whole line is left, the oldest first."""
        attempts: dict[int, Attempt] = {}
        for line in read_json_lines(self._file):
            data = {name: value for name, value in line.items() if name in _WRITTEN and _fits(name, value)}
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
        self._append({name: getattr(attempt, name) for name in _WRITTEN})
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
    """Add submitit's `job`, submitted with the profile of that name or file, to RUN/control/jobs.json."""
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
    """Take out a job that was cancelled before its start, and is of no interest to anybody."""
    _write_jobs(directory, [entry for entry in submitted_jobs(directory) if entry["job"] != job])


def mark_unwanted(directory: RunDirectory, job: str, why: str) -> None:
    """Note that `job` is to do nothing, should it start."""
    marked = [entry | ({"unwanted": why} if entry["job"] == job else {}) for entry in submitted_jobs(directory)]
    _write_jobs(directory, marked)


def _write_jobs(directory: RunDirectory, entries: list[dict[str, Any]]) -> None:
    """Write jobs.json; a damaged one is set aside: the jobs that are passed over in it may still wait."""
    if _read_jobs(directory)[1] and directory.jobs_file.is_file():
        set_aside(directory.jobs_file)
    write_atomically(directory.jobs_file, json.dumps(entries, indent=2) + "\n")


def next_job(directory: RunDirectory, job: str) -> str | None:
    """The job that follows `job` in a chain (`requeue: chain`)."""
    return next((entry["job"] for entry in submitted_jobs(directory) if entry.get("after") == job), None)


def chain_before(directory: RunDirectory, job: str) -> list[str]:
    """The jobs that came before `job` in a chain, the last one first; none for any other job."""
    after = {entry["job"]: entry.get("after") for entry in submitted_jobs(directory)}
    found: list[str] = []
    while (before := after.get(found[-1] if found else job)) is not None and before not in found:
        found.append(before)
    return found


def submitted_jobs(directory: RunDirectory) -> list[dict[str, Any]]:
    """The jobs that were submitted for this run, the oldest first.

    Keys: job, stages, cluster, profile, submitted, log; process (`lock.Process`) where it is one of this machine;
    after, the job whose end it waits for, in a chain.
    """
    jobs, damage = _read_jobs(directory)
    if damage:
        warn_once(f"{directory.jobs_file} is damaged{damage}")
    return jobs


def _read_jobs(directory: RunDirectory) -> tuple[list[dict[str, Any]], str]:
    """The jobs in jobs.json, and what is damaged in it: nothing, if that is empty."""
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
    return (
        isinstance(entry, dict)
        and all(
            isinstance(entry.get(key), str) and "\0" not in entry[key] for key in ("job", "stages", "cluster", "log")
        )
        and NAME.fullmatch(entry["job"]) is not None
        and all(isinstance(entry.get(key), str | None) for key in ("profile", "after", "unwanted"))
        and _fits_number(entry.get("submitted"))
    )


def submitted_process(entry: dict[str, Any]) -> Process:
    """What was started in the background of this machine; of what was submitted elsewhere a process that never was."""
    return Process.noted(entry.get("process"))


def known_jobs(directory: RunDirectory) -> list[str]:
    """Slurm's ids of this run's own jobs, submitted or noted by an attempt, the oldest first."""
    submitted = [entry["job"] for entry in submitted_jobs(directory) if entry["cluster"] == "slurm"]
    started = [attempt.job for attempt in AttemptLog(directory).read() if attempt.job is not None and attempt.own_job]
    return list(dict.fromkeys([*submitted, *started]))


def _own_log() -> str | None:
    """The file that this process prints to, if it is one; plain sbatch puts it where the user said."""
    output = Path("/proc/self/fd/1")
    return str(output.resolve()) if output.is_file() else None
