"""The foreground commands: a stage with its ranks on this machine, or over the allocation that it was called in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.load import read_run_dir
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.enter import prepare_run, prepared_run
from tango_hpc.runner.environment import await_file, place, python_path, rendezvous_file
from tango_hpc.runner.job import run_attempt
from tango_hpc.runner.program import Program
from tango_hpc.runner.snapshot import take_snapshot
from tango_hpc.runner.starters import rank_command, rank_environment


def run_foreground(program: Program, config_file: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run `program` to its end and return the exit code: 0 done, 85 saved, 78 or 2 wrong input, 75 a node
    kept it from starting, 1 failed.

    In a task of an srun step this process becomes the rank. In a batch job the code and the configuration of the
    job's first start are what runs, also after a requeue.
    """
    directory = _requeued_run(config_file, overrides)
    if directory is not None:
        _become_job(directory, program)
    config = load_config(config_file, overrides)
    where = place(os.environ, config.world_size)
    if where == "rank":
        _become_rank(program, config, resume=resume)
    with prepared_run([program], config, resume=resume, where=where) as entry:
        if "SLURM_JOB_ID" in os.environ and not sys.stdin.isatty():
            take_snapshot(entry.directory.snapshot, record_diff=config.run.record_diff)
            _become_job(entry.directory, program)
        return run_attempt(entry.directory, program, config, Console(), entry)


def _requeued_run(config_file: Path, overrides: Sequence[str]) -> RunDirectory | None:
    """Return the run that this very job began before it was requeued; the config file may have changed meanwhile."""
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0 or slurm.in_step():
        return None
    directory = RunDirectory(read_run_dir(config_file, overrides))
    job = slurm.job_id()
    return directory if any(attempt.job == job for attempt in AttemptLog(directory).read()) else None


def _become_job(directory: RunDirectory, program: Program) -> None:
    """Go on as the batch job of the run, in the code of its snapshot."""
    env = os.environ | {"PYTHONPATH": python_path(directory.snapshot)}
    words = [sys.executable, "-P", "-u", "-m", program.job_module, str(directory.path), program.name]
    os.execve(sys.executable, words, env)


def _become_rank(program: Program, config: Config, *, resume: bool) -> None:
    """Make the run directory on rank 0, then become `python -m tango_hpc.stages.rank`."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # until the rank has its own handlers: the next program inherits this
    directory = RunDirectory(config.run.dir)
    meeting = rendezvous_file(directory, os.environ).with_suffix(".ready")
    if os.environ["SLURM_PROCID"] == "0":
        try:
            directory = prepare_run([program], config, resume=resume)
        except UserError:
            slurm.end_this_step()  # the other tasks would wait in vain
            raise
        meeting.touch()
    else:
        await_file(meeting)
    words = [*rank_command(program), str(directory.path), program.name]
    os.execvpe(words[0], words, os.environ | rank_environment(config))
