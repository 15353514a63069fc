"""submitit's job, told the truth: without accounting submitit takes a dead job for one that runs for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from submitit.core.core import InfoWatcher
from submitit.slurm.slurm import SlurmJob

from tango_hpc.manage.asking import Asking
from tango_hpc.manage.status import RunState, states
from tango_hpc.run.directory import RunDirectory


class RunJob(SlurmJob[dict]):
    """A Slurm job of one run. Its state comes from the run directory and the queue; `result()` is the summary.

    Of a run that saved and stopped it is the summary so far; of one that failed it raises submitit's errors. While
    Slurm does not answer, it waits.
    """

    watcher = InfoWatcher()  # asks nobody

    def __init__(self, folder: Path | str, job_id: str, run_dir: Path) -> None:
        self.directory = RunDirectory(run_dir)
        self._asking = Asking([self.directory])
        self._run_state: RunState | None = None
        super().__init__(folder, job_id)

    def run_state(self) -> RunState:
        """What `tango status` shows, at most some seconds old."""
        if self._asking.is_due() or self._run_state is None:
            self._run_state = states([self.directory])[0]
        return self._run_state

    @property
    def state(self) -> str:
        """One of waiting, running, unknown, stopped, failed, lost and done, in capitals."""
        return self.run_state().state.upper()

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """State and detail."""
        state = self.run_state()
        return {"State": state.state.upper(), "Detail": state.detail}

    def done(self, force_check: bool = False) -> bool:
        """Whether nothing more will happen by itself; a job that requeued itself is not done."""
        if force_check:
            self._run_state = None
        return self.run_state().is_over

    def __reduce__(self) -> tuple[Any, ...]:
        return RunJob, (self.paths.folder, self.job_id, self.directory.path)
