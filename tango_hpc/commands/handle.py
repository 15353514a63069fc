"""submitit's job, told the truth: without accounting submitit takes a dead job for one that runs for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from submitit.core.core import InfoWatcher
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmJob

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.asking import Asking
from tango_hpc.commands.status import RunState, states
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, next_job


class RunJob(SlurmJob[dict]):
    """A Slurm job of one run. Its state comes from the run directory and the queue; `result()` is the summary.

    Of a run that saved and stopped it is the summary so far; of one that failed it raises submitit's errors. While
    Slurm does not answer, it waits.
    """

    watcher = InfoWatcher()  # does not ask Slurm

    def __init__(self, folder: Path | str, job_id: str, run_dir: Path) -> None:
        self.directory = RunDirectory(run_dir)
        self._asking = Asking([self.directory])
        self._run_state: RunState | None = None
        super().__init__(folder, job_id)

    def run_state(self) -> RunState:
        """Return the state that `tango status` shows, at most some seconds old."""
        if self._asking.is_due() or self._run_state is None:
            self._run_state = states([self.directory])[0]
        return self._run_state

    @property
    def paths(self) -> JobPaths:
        """submitit's files of this job; in a chain, those of the last one that has followed it."""
        started = {attempt.job for attempt in AttemptLog(self.directory).read()}
        last = [job for job in self._chain() if job == self.job_id or job in started][-1]
        return JobPaths(self._paths.folder, job_id=last, task_id=self.task_id)

    def cancel(self, check: bool = True) -> None:
        """End this job and those that follow it in a chain, the last one first. They save if there is time."""
        for job in reversed(self._chain()):
            found = slurm.show_job(job)
            if found is not None and found.is_alive:
                slurm.run_command("scancel", job, check=check)

    def _chain(self) -> list[str]:
        """Return the ids of this job and of those that follow it."""
        jobs = [self.job_id]
        while (following := next_job(self.directory, jobs[-1])) is not None:
            jobs.append(following)
        return jobs

    @property
    def state(self) -> str:
        """One of waiting, running, unknown, stopped, failed, lost and done, in capitals."""
        return self.run_state().state.upper()

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """State and detail."""
        state = self.run_state()
        return {"State": state.state.upper(), "Detail": state.detail}

    def done(self, force_check: bool = False) -> bool:
        """Return whether nothing more will happen by itself; a job that requeued itself is not done."""
        if force_check:
            self._run_state = None
        return self.run_state().is_over

    def __reduce__(self) -> tuple[Any, ...]:
        return RunJob, (self.paths.folder, self.job_id, self.directory.path)
