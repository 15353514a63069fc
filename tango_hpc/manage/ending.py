"""`tango cancel` and `tango stop`: the two ways to end runs from outside."""

from __future__ import annotations

import getpass
import signal
from pathlib import Path

from rich.console import Console

from tango_hpc.control.stop import StopRequest, request_stop
from tango_hpc.errors import UserError
from tango_hpc.launch import slurm
from tango_hpc.launch.attempts import AttemptLog, known_jobs
from tango_hpc.launch.lock import signal_holder
from tango_hpc.manage.status import find_runs, states


def cancel(path: Path, console: Console) -> None:
    """End the run, or all runs below a folder: Slurm's jobs by scancel, others by SIGTERM. They save if there is time.

    Raises UserError where Slurm does not answer for some of them.
    """
    silent: list[str] = []
    for directory in find_runs(path):
        ended = []
        unanswered = len(silent)
        for job in reversed(known_jobs(directory)):  # one that waits for another's end first
            try:
                found = slurm.show_job(job) if slurm.is_available() else None
                if found is not None and found.is_alive:
                    slurm.run_command("scancel", job)
                    ended.append(f"job {job}")
            except UserError as error:
                silent.append(f"job {job} of {directory.path}: {error}")
        if not ended:
            pid = signal_holder(directory, signal.SIGTERM)
            ended += [f"process {pid}"] if pid is not None else []
        last = AttemptLog(directory).read()[-1:]
        if ended:
            message = f"cancelled {', '.join(ended)}"
        elif len(silent) > unanswered:
            message = "whether it runs or waits is not known"
        elif last and last[0].ended is None and last[0].job is not None and not last[0].own_job:
            message = f"it was started inside job {last[0].job}, which is not its own: `tango stop` ends the run alone"
        else:
            message = "nothing runs or waits"
        console.print(f"{directory.path}: {message}", markup=False, highlight=False, soft_wrap=True)
    if silent:
        raise UserError("\n".join(["not cancelled; try again:", *silent]))


def stop(path: Path, console: Console) -> None:
    """Have the run, or all runs below a folder, save at the next safe point and end for good; waiting jobs are cancelled.

    Raises UserError where Slurm does not tell of some of them whether they wait or run; those that run still stop.
    """
    directories = find_runs(path)
    silent: list[str] = []
    for directory, state in zip(directories, states(directories), strict=True):
        if state.state == "waiting" and state.job is not None:
            try:
                slurm.run_command("scancel", state.job)
                message = f"job {state.job} was waiting and is cancelled"
            except UserError as error:
                silent.append(f"{directory.path}: {error}")
                message = f"job {state.job} waits, and is not cancelled"
        elif state.state in ("running", "unknown"):
            request_stop(directory, StopRequest("user", f"tango stop by {getpass.getuser()}"))
            message = "saves at its next safe point and ends"
            if state.state == "unknown":
                silent.append(f"{directory.path}: {state.detail}")
                message = f"if it runs, it {message}; whether it waits is not known"
        else:
            message = f"nothing to stop: {state.state}"
        console.print(f"{directory.path}: {message}", markup=False, highlight=False, soft_wrap=True)
    if silent:
        raise UserError("\n".join(["Slurm did not answer for all; try again:", *silent]))
