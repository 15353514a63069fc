"""`tango cancel` and `tango stop`: the two ways to end runs from outside."""

from __future__ import annotations

import getpass
import signal
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from tango_hpc.base.config.load import read_yaml
from tango_hpc.base.errors import UserError
from tango_hpc.base.formats import say
from tango_hpc.base.run.directory import RunDirectory, is_run
from tango_hpc.commands.status import find_runs, states
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, known_jobs, submitted_jobs, submitted_process
from tango_hpc.runner.lock import holder_of, is_held, signal_holder
from tango_hpc.runner.stop import StopRequest, request_stop


def cancel(path: Path, console: Console) -> None:
    """End the run, or all runs below a folder: Slurm's jobs by scancel, others by SIGTERM. They save if there is time.

    Raises UserError where Slurm does not answer for some of them.
    """
    silent: list[str] = []
    directories = _without_copies(find_runs(path), console)
    for directory in directories:
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
            try:
                ended += _end_process(directory)
            except OSError as error:  # another user's file, say
                if len(directories) == 1:
                    raise
                silent.append(f"{directory.path}: {error.strerror}")
        last = AttemptLog(directory).read()[-1:]
        if ended:
            message = f"cancelled {', '.join(ended)}"
        elif len(silent) > unanswered:
            message = "whether it runs or waits is not known"
        elif last and last[0].ended is None and last[0].job is not None and not last[0].own_job:
            message = f"it was started inside job {last[0].job}, which is not its own: `tango stop` ends the run alone"
        elif (
            (holder := holder_of(directory)) is not None and not (holder.job and holder.own_job) and is_held(directory)
        ):
            message = f"{holder} runs it, out of reach from here: `tango stop` ends the run"
        else:
            message = "nothing runs or waits"
        say(console, f"{directory.path}: {message}")
    if silent:
        raise UserError("\n".join(["not cancelled; try again:", *silent]))


def _without_copies(directories: list[RunDirectory], console: Console) -> list[RunDirectory]:
    """Return the runs that were started in the folder where they lie; the jobs and processes in a copy of a
    run's folder are
    that run's.
    """
    found = []
    for directory in directories:
        original = _started_in(directory)
        if original is None or not is_run(original) or original.samefile(directory.path):
            found.append(directory)
            continue
        message = f"a copy of {original}, whose job or process it names: left alone"
        say(console, f"{directory.path}: {message}")
    return found


def _started_in(directory: RunDirectory) -> Path | None:
    """Return the run directory that its config.yaml names, as it was when it was last started; None for a
    damaged file.
    """
    with suppress(UserError, KeyError, TypeError):
        return Path(read_yaml(directory.config)["run"]["dir"])
    return None


def _end_process(directory: RunDirectory) -> list[str]:
    """Send SIGTERM to the run's process on this machine, also before it has begun, and return a line about it."""
    pid = signal_holder(directory, signal.SIGTERM)
    if pid is None:
        for entry in submitted_jobs(directory)[-1:]:
            process = submitted_process(entry)
            pid = process.pid if process.send(signal.SIGTERM) else None
    return [f"process {pid}"] if pid is not None else []


def stop(path: Path, console: Console) -> None:
    """Have the run, or all runs below a folder, save at the next safe point and end for good; waiting jobs are
    cancelled.

    Raises UserError where Slurm does not say of some of them whether they wait or run; those that run still stop.
    """
    directories = _without_copies(find_runs(path), console)
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
            message = "saves at its next safe point and ends"
            try:
                request_stop(directory, StopRequest("user", f"tango stop by {getpass.getuser()}"))
            except OSError as error:
                if len(directories) == 1:
                    raise
                silent.append(f"{directory.path}: {error.strerror}")
                message = f"cannot be told to stop: {error.strerror}"
            if state.state == "unknown":
                silent.append(f"{directory.path}: {state.detail}")
                message = f"if it runs, it {message}; whether it waits is not known"
        else:
            message = f"nothing to stop: {state.state}"
        say(console, f"{directory.path}: {message}")
    if silent:
        raise UserError("\n".join(["not all could be told to stop; try again:", *silent]))
