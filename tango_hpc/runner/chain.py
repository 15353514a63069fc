"""Jobs that follow each other, where Slurm may not start one again: `requeue: chain` in the profile.

As soon as its ranks are started, a job submits the next one, which waits for its end whatever that is (`afterany`): so
the run also goes on where nothing could be done in the end, as when a node dies. When nothing is left to do, the next
job is cancelled. It is submitted once: where sbatch does not say whether it has taken a job, the queue is looked at,
in which the next job is known by its batch script, RUN/logs/submitit/JOB_submission.sh.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import (
    chain_before,
    forget_job,
    mark_unwanted,
    next_job,
    remember_next_job,
    submitted_jobs,
)
from tango_hpc.runner.requeue import LAST_SECONDS, PATIENCE_SECONDS, RETRY_SECONDS
from tango_hpc.runner.stop import read_stop_request

# Set by the batch script of a job that is to be continued by another one.
VARIABLE = "TANGO_CHAIN"
# While the ranks run, there is time.
RETRY_WHILE_RUNNING_SECONDS = 60.0
# Slurm answers, and refuses all the same: so long the nodes are held in the end, where the job has the time.
REFUSED_SECONDS = 600.0
# What is not cancelled by then does nothing when it starts, and this job holds its nodes no longer.
CANCEL_SECONDS = 60.0


class Chain:
    """The job that this process is the batch process of, and the one that follows it. `say` prints a line."""

    def __init__(self, directory: RunDirectory, job: str, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._job = job
        self._say = say
        self._asked = False  # sbatch, which has named no job yet
        self._next_try = 0.0
        self._problem = ""

    @classmethod
    def of_this_job(
        cls, directory: RunDirectory, say: Callable[[str], None], env: Mapping[str, str] = os.environ
    ) -> Chain | None:
        """Return the chain of this job; None outside a batch process, and where the job has no successor."""
        job = slurm.job_id(env)
        return cls(directory, job, say) if job and VARIABLE in env and slurm.is_batch_process(env) else None

    @property
    def jobs(self) -> list[str]:
        """This job and those before it, the last one first."""
        return [self._job, *chain_before(self._directory, self._job)]

    @property
    def is_continuation(self) -> bool:
        """Return whether there was a job before this one."""
        return len(self.jobs) > 1

    def why_not(self) -> str | None:
        """Return why this job is not to go on where the one before it ended, if it is not."""
        own = self._entry(self._job)
        if own is not None and own.get("unwanted"):
            return own["unwanted"]
        with suppress(UserError):
            found = slurm.show_job(self.jobs[1]) if self.is_continuation else None
            if found is not None and found.was_cancelled:
                return f"job {self.jobs[1]} was cancelled"
        return None

    def submit(self) -> None:
        """Submit the next job unless there is one. To be called again and again: a refusal is tried again in a
        minute.
        """
        if time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + RETRY_WHILE_RUNNING_SECONDS
        problem = self._try()
        if problem and not self._problem:
            self._say(f"The job after this one is not submitted yet: {problem}. Tried again every minute.")
        self._problem = problem

    def goes_on(self, seconds_left: float | None, command: str, wait: Callable[[float], None]) -> bool:
        """Return whether the next job continues this run, which has saved or failed: it is submitted now if need be.

        What Slurm answers nothing to is tried again until the end of this job, what it refuses for `REFUSED_SECONDS`.
        `command` continues the run by hand, `wait` passes so many seconds.
        """
        patience = PATIENCE_SECONDS if seconds_left is None else max(seconds_left - LAST_SECONDS, 0.0)
        until = time.monotonic() + patience
        refused_until: float | None = None
        while True:
            asked = read_stop_request(self._directory)
            if asked is not None and asked.by == "user":
                self._say(f"Not continued: {asked.why}.")
                return False
            problem = ""
            following = next_job(self._directory, self._job)
            try:
                for job in filter(None, (self._job, following)):
                    found = slurm.show_job(job)
                    if found is None or found.was_cancelled:
                        self._say(f"Not continued: job {job} was cancelled.")
                        return False
            except UserError as error:
                problem = str(error)  # the next job asks again when it starts
            if following is not None:
                self._say(f"Job {following} continues from the last checkpoint when this one has ended.")
                return True
            answers = not problem
            problem = problem or self._try()
            if not problem:
                return True
            end = until
            if answers:
                refused_until = time.monotonic() + REFUSED_SECONDS if refused_until is None else refused_until
                end = min(until, refused_until)
            left = end - time.monotonic()
            if left < 0:
                self._say(f"Not continued: {problem}")
                return False
            if not self._problem:
                self._say(
                    f"The job after this one is not submitted yet: {problem}. Tried again for {left:.0f} s. "
                    f"Should none come, continue with: {command}"
                )
            self._problem = problem
            wait(min(RETRY_SECONDS, max(left, 0.1)))

    def end(self, why: str) -> None:
        """Cancel the next job, as the run is done or must not go on; if that fails, the job finds `why` and ends."""
        until = time.monotonic() + CANCEL_SECONDS
        while True:
            try:
                following = next_job(self._directory, self._job)
                if following is None and self._asked:
                    following = slurm.submitted_from(self._script)
                if following is None:
                    return
                mark_unwanted(self._directory, following, why)
                found = slurm.show_job(following)
                if found is not None and found.is_alive:
                    slurm.run_command("scancel", following)
                    self._say(f"Job {following}, which was to continue this run, is cancelled.")
                forget_job(self._directory, following)
                return
            except UserError as error:
                if time.monotonic() > until:
                    self._say(f"The job that was to continue this run is not cancelled ({error}); it will do nothing.")
                    return
            time.sleep(RETRY_SECONDS)

    @property
    def _script(self) -> Path:
        return self._directory.submitit_logs / f"{self._job}_submission.sh"

    def _try(self) -> str:
        """Return why there is no next job yet; empty where there is one."""
        if next_job(self._directory, self._job) is not None:
            return ""
        own = self._entry(self._job)
        if own is None:
            return f"job {self._job} does not stand in {self._directory.jobs_file}"
        try:
            following = slurm.submitted_from(self._script) if self._asked else None
            if following is None:
                self._asked = True
                following = slurm.submit_after(self._job, self._script, self._environment())
            self._keep_files(following, own)
            self._asked = False
        except (UserError, OSError) as error:
            return str(error)
        self._say(f"Job {following} continues this run when this one ends; it is cancelled if nothing is left to do.")
        return ""

    def _entry(self, job: str) -> dict[str, Any] | None:
        return next((entry for entry in submitted_jobs(self._directory) if entry["job"] == job), None)

    def _keep_files(self, following: str, own: dict[str, Any]) -> None:
        """Rename the files that submitit looks for under the name of the job, which has not started: it waits for this
        one.
        """
        folder = self._directory.submitit_logs
        for name in ("submitted.pkl", "submission.sh"):
            shutil.copyfile(folder / f"{self._job}_{name}", folder / f"{following}_{name}")
        remember_next_job(self._directory, following, own, folder / f"{following}_0_log.out")

    def _environment(self) -> dict[str, str]:
        """Return the environment of the first job, without what its batch script will set again."""
        env = slurm.without_job(os.environ)
        for name in (slurm.BATCH_MARK, VARIABLE, "SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER"):
            env.pop(name, None)
        ours = str(self._directory.snapshot)
        path = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", ours)]
        return env | {"PYTHONPATH": os.pathsep.join(path)}
