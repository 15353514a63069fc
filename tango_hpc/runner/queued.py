"""The jobs of a run in Slurm's queue, seen from outside."""

from __future__ import annotations

import shlex

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_summary
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, known_jobs, submitted_jobs


def check_no_job_waits(directory: RunDirectory) -> None:
    """Raise UserError where a job of this run waits or runs, or Slurm does not answer."""
    for job in known_jobs(directory) if slurm.is_available() else ():
        try:
            found = slurm.show_job(job)
        except slurm.NoAnswer as error:
            raise UserError(
                f"whether job {job} of {directory.path} waits or runs is not known, so nothing was started; try again "
                f"later. {error}"
            ) from None
        if found is not None and found.is_alive:
            run = shlex.quote(str(directory.path))
            raise UserError(f"job {job} of {directory.path} is {found.state}; `tango cancel {run}` ends it")


def never_started(directory: RunDirectory) -> bool:
    """Return whether the run was submitted, and no job of it has come to its start."""
    started = AttemptLog(directory).read() or read_summary(directory).get("stages")
    return bool(submitted_jobs(directory)) and not started
