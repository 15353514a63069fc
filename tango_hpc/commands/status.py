"""`tango status` and `logs`: from the run directory first, then from Slurm, whose memory is short."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from tango_hpc.base.errors import CheckFailed, StoppedEarly, UserError
from tango_hpc.base.files import warn_once
from tango_hpc.base.formats import say, with_colours
from tango_hpc.base.run.directory import RunDirectory, runs_below
from tango_hpc.base.run.progress import read_progress
from tango_hpc.base.run.step_names import damaged_in
from tango_hpc.base.run.summary import read_summary
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.asking import Asking
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog, known_jobs, submitted_jobs, submitted_process
from tango_hpc.runner.enter import is_done
from tango_hpc.runner.heartbeat import part_under_way, seconds_since_beat
from tango_hpc.runner.lock import is_held
from tango_hpc.runner.outcome import read_failures

FOLLOW_SECONDS = 1.0
STALE_HEARTBEAT_SECONDS = 120.0
MAX_LOG_BYTES = 4 * 2**20  # of each log are looked at for its last lines


@dataclass(frozen=True)
class RunState:
    """The state of one run.

    `state` is new, waiting, running, unknown (Slurm does not answer), stopped (saved, resumable), failed, lost (ended
    without a word) or done.
    """

    run: str
    stage: str
    state: str
    detail: str = ""
    step: int | None = None
    total_steps: int | None = None
    attempts: int = 0
    job: str | None = None
    job_state: str | None = None

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will happen by itself."""
        return self.state not in ("waiting", "running", "unknown")


def find_runs(path: Path) -> list[RunDirectory]:
    """Return the run at `path`, or all runs below it. Raises UserError where there is none."""
    if (path / "config.yaml").is_file():
        return [RunDirectory(path)]
    refused = list[str]()
    found = sorted(runs_below(path, refused=refused))
    locked = f"{len(refused)} that you may not read ({refused[0]}{', ...' if refused[1:] else ''})" if refused else ""
    if not found:
        but = f", except for {locked}" if locked else ""
        raise UserError(
            f"{path} is no run directory and holds none{but}; give the run.dir of a run, or a folder of runs"
        )
    if locked:
        warn_once(f"{path}: folders are passed over, {locked}")
    return [RunDirectory(folder) for folder in found]


def states(directories: list[RunDirectory]) -> list[RunState]:
    """Return the state of each run, with one question to Slurm for all of them."""
    owners: dict[str, int] = {}
    for directory in directories:
        jobs = [*known_jobs(directory), *(attempt.job for attempt in AttemptLog(directory).read()[-1:] if attempt.job)]
        if jobs:
            owners |= dict.fromkeys(jobs, directory.path.stat().st_uid)
    queue = slurm.queue(owners)
    return [run_state(directory, queue) for directory in directories]


def run_state(directory: RunDirectory, queue: Mapping[str, tuple[str, str]]) -> RunState:
    """Return the state of one run; `queue` is what Slurm says of its jobs, as far as it still knows them."""
    return state_of(RunRecord(directory, queue))


class RunRecord:
    """All that was read of one run, each part when it is first asked for. `queue` has state and reason by job."""

    def __init__(self, directory: RunDirectory, queue: Mapping[str, tuple[str, str]]) -> None:
        self._directory, self._queue = directory, queue
        self.run = str(directory.path)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The attempts, the oldest first."""
        return AttemptLog(self._directory).read()

    @cached_property
    def last(self) -> Attempt | None:
        """The last attempt."""
        return self.attempts[-1] if self.attempts else None

    @cached_property
    def submitted(self) -> dict[str, Any] | None:
        """The last job that was submitted."""
        return next(reversed(submitted_jobs(self._directory)), None)

    @cached_property
    def unstarted(self) -> dict[str, Any] | None:
        """The last job that was submitted, if it has made no attempt and was not there to find all done."""
        submitted = self.submitted
        if submitted is None or _has_started(submitted, self.attempts):
            return None
        state, _ = self.in_queue(self.newest_job)
        may_start = state == slurm.UNKNOWN or slurm.is_alive(state)
        finds_all_done = all(self.is_done(stage) for stage in submitted["stages"].split(","))
        return submitted if may_start or not finds_all_done else None

    @cached_property
    def newest_job(self) -> str | None:
        """Return the attempt's job inside a user's allocation, else the run's own present job."""
        if self.last is not None and self.last.ended is None and not self.last.own_job:
            return self.last.job
        return _job_that_counts(known_jobs(self._directory), self._queue)

    @cached_property
    def last_stage(self) -> str:
        """The last stage that was asked for; without a job that of the last attempt."""
        return self.submitted["stages"].split(",")[-1] if self.submitted is not None else self.attempted_stage

    @cached_property
    def attempted_stage(self) -> str:
        """The stage of the last attempt, else the first one in the summary, else ""."""
        if self.last is not None:
            return self.last.stage
        return next(iter(read_summary(self._directory).get("stages", {})), "")

    @cached_property
    def progress(self) -> dict[str, Any]:
        """The last progress of the run."""
        return read_progress(self._directory)

    def in_queue(self, job: str | None) -> tuple[str | None, str]:
        """Return state and reason of a job in Slurm's queue; None where it is not there."""
        return self._queue.get(job, (None, "")) if job else (None, "")

    def is_done(self, stage: str) -> bool:
        """Return whether the stage has run to its end."""
        return is_done(self._directory, stage)

    def is_held(self) -> bool:
        """Return whether a live process holds the run's lock."""
        return is_held(self._directory)

    def status_of_ranks(self, stage: str) -> str:
        """Return the status of a stage without a supervisor, as rank 0 has written it."""
        status = read_summary(self._directory).get("stages", {}).get(stage, {}).get("status", "new")
        return (
            "lost"
            if status == "running" and seconds_since_beat(self._directory, 0) > STALE_HEARTBEAT_SECONDS
            else status
        )

    def activity(self, stage: str) -> str:
        """Return what the ranks of a running stage are doing, in words."""
        last = self.last
        if last is not None and (
            last.ended is not None or not _is_newer(self._directory.progress, self._directory.attempts_file)
        ):
            return "starting" if last.ended is None else "starting or ending"
        current = self.progress if self.progress.get("stage") == stage else {}
        part = part_under_way(self._directory, current.get("phase", ""))
        return " ".join(map(str, filter(None, (current.get("role"), current.get("phase"), part))))

    def damaged(self, stage: str) -> list[str]:
        """Return the names of the stage's checkpoints that were set aside."""
        return damaged_in(self._directory.checkpoints / stage)


def state_of(record: RunRecord) -> RunState:
    """Decide the state of a run from what was read of it."""
    last, unstarted, job = record.last, record.unstarted, record.newest_job
    job_state, reason = record.in_queue(job)
    follows = unstarted is not None and "after" in unstarted and last is not None  # the next job of a chain
    stage = unstarted["stages"].partition(",")[0] if unstarted is not None and not follows else record.attempted_stage
    is_final = last is not None and _is_final(last, record.last_stage)
    if follows and last is not None and (last.ended is None or is_final):
        unstarted = None  # it may not even be needed
        job = job if slurm.is_alive(job_state) else last.job
        job_state, reason = record.in_queue(job)
    if job_state in slurm.WAITING_STATES:
        goes_on = last is not None and last.saved_after and (follows or not unstarted)
        continues = f"; continues from {last.saved_after}" if last is not None and goes_on else ""
        state, detail = "waiting", reason + continues
    elif slurm.is_alive(job_state):
        state, detail = "running", ""
    elif job_state == slurm.UNKNOWN and not (unstarted is None and is_final):
        known = describe(last) if last is not None and unstarted is None else "it had not started"
        state, detail = "unknown", f"{reason}; by its files: {known}"
    elif unstarted is not None:
        state, detail = _before_its_start(unstarted, job_state)
    elif last is not None:
        state, detail = _after_its_start(record, last, job_state)
    else:
        state, detail = record.status_of_ranks(stage), ""
    current = record.progress if record.progress.get("stage") == stage else {}
    if state == "running":
        detail = record.activity(stage)
    damaged = record.damaged(stage)
    notes = [*current.get("troubles", ()), *([f"set aside as damaged: {', '.join(damaged)}"] if damaged else [])]
    return RunState(
        run=record.run,
        stage=stage,
        state=state,
        detail="; ".join(filter(None, (detail, *map(str, notes)))),
        step=current.get("step"),
        total_steps=current.get("total_steps"),
        attempts=len(record.attempts),
        job=job,
        job_state=job_state,
    )


def _job_that_counts(jobs: list[str], queue: Mapping[str, tuple[str, str]]) -> str | None:
    """Return the present one of a run's jobs, the oldest first: the one that runs, else the last that waits, else the
    last.
    """
    states_of = {job: queue.get(job, ("", ""))[0] for job in jobs}
    alive = [job for job, state in states_of.items() if slurm.is_alive(state)]
    running = [job for job in alive if states_of[job] not in slurm.WAITING_STATES]
    for found in (running, alive):
        if found:
            return found[-1]
    return jobs[-1] if jobs else None


def _has_started(submitted: dict[str, Any], attempts: list[Attempt]) -> bool:
    """Return whether what was submitted has made an attempt. Clocks of nodes differ: only those of one machine are
    compared.
    """
    if submitted["cluster"] == "slurm":
        return any(attempt.job == submitted["job"] for attempt in attempts)
    return bool(attempts) and submitted["submitted"] <= attempts[-1].started


def _is_final(last: Attempt, last_stage: str) -> bool:
    """Return whether no job comes back after this attempt, whatever Slurm has to say."""
    if last.code == 0:
        return last.stage == last_stage
    return last.ended is not None and last.code in (UserError.exit_code, CheckFailed.exit_code)


def _is_newer(file: Path, other: Path) -> bool:
    """Return whether `file` was written after `other`, by the clock of the file server that has both."""
    return file.is_file() and file.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _before_its_start(submitted: dict[str, Any], job_state: str | None) -> tuple[str, str]:
    """State and detail of a job that is not in the queue and has left no attempt."""
    if submitted["cluster"] != "slurm":
        alive = submitted_process(submitted).is_alive
        return ("running", "") if alive else ("failed", "its process ended before the run started")
    ended = job_state or slurm.accounting(submitted["job"]) or "no longer in the queue"
    if ended.startswith("CANCELLED"):
        return "stopped", f"job {submitted['job']} was cancelled before the run started"
    return "failed", f"job {submitted['job']} ended before the run started: {ended}"


def _after_its_start(record: RunRecord, last: Attempt, job_state: str | None) -> tuple[str, str]:
    """State and detail of a run whose last attempt is not in the queue (any more, or never was)."""
    if last.code == 0 and last.job is not None and last.stage != record.last_stage:
        return "lost", f"ended between {last.stage} and {record.last_stage}"
    if last.ended is not None:
        states_by_code = {0: "done", StoppedEarly.exit_code: "stopped"}
        return states_by_code.get(last.code or 0, "failed"), last.reason
    if last.job is None and record.is_held():
        return "running", ""
    ended = job_state or (slurm.accounting(last.job) if last.job and last.own_job else None)
    return "lost", f"ended without a word{f': {ended}' if ended else ''}; --resume continues from the last checkpoint"


def show_logs(path: Path, console: Console, *, rank: int | None, lines: int, follow: bool) -> None:
    """Print why a run failed, if it did, then the last lines of its logs; `follow` goes on until it is over.

    Without `rank`: the supervisor's log and those of rank 0. Of a folder of runs, one run after the other; when
    followed, new lines come under the name of their run. Raises UserError where there is no run.
    """
    directories = find_runs(path)
    several = len(directories) > 1
    tails = [_Tail(directory, rank, console) for directory in directories]
    for tail in tails:
        if several:
            tail.say(f"===== {tail.directory.path} =====")
        tail.show(lines)
        if several:
            tail.say("")
    left = tails if follow else []
    asking = Asking([tail.directory for tail in left])
    last_shown: _Tail | None = None
    while left:
        ask = asking.is_due()
        over = [state.is_over for state in states([tail.directory for tail in left])] if ask else [False] * len(left)
        for tail, ended in zip(left, over, strict=True):
            new = tail.news()
            if ended:
                attempts = AttemptLog(tail.directory).read()
                new.append(describe(attempts[-1]) if attempts else _never_started(tail.directory))
            if new and several and tail is not last_shown:
                tail.say(f"===== {tail.directory.path} =====")
                last_shown = tail
            for text in new:
                tail.say(text)
        if any(over):
            left = [tail for tail, ended in zip(left, over, strict=True) if not ended]
            asking = Asking([tail.directory for tail in left])
        if left:
            time.sleep(FOLLOW_SECONDS)


class _Tail:
    """The logs of one run, shown as they grow."""

    def __init__(self, directory: RunDirectory, rank: int | None, console: Console) -> None:
        self.directory = directory
        self._rank = rank
        self._console = console
        self._places: dict[Path, int] = {}

    def say(self, text: str) -> None:
        """Print `text`, with the colours that logs have."""
        say(self._console, text, with_colours)

    def show(self, lines: int) -> None:
        """Print the cause of a failure, the attempts, and the last `lines` of each log."""
        attempts = AttemptLog(self.directory).read()
        for text in _why(self.directory, attempts):
            self.say(text)
        for attempt in attempts:
            self.say(describe(attempt))
        if not attempts and submitted_jobs(self.directory):
            self.say(_never_started(self.directory))
        for file in _log_files(self.directory, self._rank):
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - MAX_LOG_BYTES))
                content = stream.read()
                self._places[file] = stream.tell()
            self.say(f"\n==> {file} <==")
            self.say("\n".join(content.decode(errors="replace").splitlines()[-lines:] if lines > 0 else []))

    def news(self) -> list[str]:
        """Return the text that the logs gained since the last call."""
        found = []
        for file in _log_files(self.directory, self._rank):
            with file.open("rb") as stream:
                stream.seek(self._places.get(file, 0))
                new = stream.read()
                self._places[file] = stream.tell()
            if new:
                found.append("\n".join(new.decode(errors="replace").rstrip("\n").splitlines()))
        return found


def _never_started(directory: RunDirectory) -> str:
    """Return the state of a run that has no file to read yet."""
    state = states([directory])[0]
    again = "" if state.state in ("waiting", "unknown", "running") else "; nothing has run, submit it again as before"
    return f"no attempt yet, {state.state}: {state.detail}{again}" if state.detail else "nothing runs here"


def _why(directory: RunDirectory, attempts: list[Attempt]) -> Iterator[str]:
    """Yield the cause of a failure with its traceback, then what else broke."""
    reason = attempts[-1].reason if attempts and attempts[-1].code not in (None, 0) else ""
    failures = sorted(read_failures(directory), key=lambda failure: failure.title() != reason)
    if failures and reason not in ("", failures[0].title()):
        yield f"{reason}\n"  # the cause left no words of its own: it was killed, or it hung
    elif failures:
        yield f"{failures.pop(0).text()}\n"
    elif reason:
        yield f"{reason}\n"
    yield from (failure.title() for failure in failures)


def describe(attempt: Attempt) -> str:
    """Return one attempt in a line."""
    start = datetime.fromtimestamp(attempt.started).strftime("%Y-%m-%d %H:%M:%S")
    where = f"job {attempt.job} on {attempt.host}" if attempt.job else attempt.host
    ends = {0: "done", StoppedEarly.exit_code: "stopped", CheckFailed.exit_code: "failed a check"}
    if attempt.ended is None:
        end = "not ended"
    else:
        end = f"{ends.get(attempt.code or 0, 'failed')} after {attempt.ended - attempt.started:.0f} s"
    why = f": {attempt.reason}" if attempt.reason else ""
    return f"attempt {attempt.number}, {attempt.stage}, {start}, {where}: {end}{why}"


def _log_files(directory: RunDirectory, rank: int | None) -> Iterator[Path]:
    of_rank = sorted(directory.logs.glob(f"{Worker(rank or 0).stem}*.log"))
    if rank is not None:
        if not of_rank:
            raise UserError(f"rank {rank} has left no log in {directory.logs}")
        return _with_content(of_rank)
    supervisor = [entry["log"] for entry in submitted_jobs(directory)[-1:]]
    supervisor += [attempt.log for attempt in AttemptLog(directory).read()[-1:] if attempt.log is not None]
    here = (_where_it_lies(directory, Path(log)) for log in dict.fromkeys(supervisor))
    return _with_content([*here, directory.srun_log, *of_rank])


def _where_it_lies(directory: RunDirectory, log: Path) -> Path:
    """Return a supervisor's log, also of a run that was moved after it was written."""
    moved = directory.submitit_logs / log.name
    return moved if os.path.isfile(moved) and not os.path.isfile(log) else log


def _with_content(files: Iterable[Path]) -> Iterator[Path]:
    return (file for file in files if os.path.isfile(file) and os.path.getsize(file))  # a damaged name is no file
