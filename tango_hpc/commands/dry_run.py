"""A submission that is only tried: the script, our own checks, and Slurm's (`sbatch --test-only`)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.submit import Cluster, check_submission, script
from tango_hpc.runner import slurm
from tango_hpc.runner.enter import check_run
from tango_hpc.stages.stage import stages_named


def show_submission(
    stages: str, config: Config, profile: Profile, cluster: Cluster, asked: str, *, resume: bool
) -> None:
    """Print the sbatch script and what is `asked` for; then raise UserError where `tango submit` would. Makes
    nothing.
    """
    text = script(stages, config, profile)
    typer.echo(text)
    typer.echo(asked, err=True)
    check_submission(config, profile, cluster)
    check_run(stages_named(stages), config, resume=resume)
    if cluster == "slurm":
        check_script(text)


def check_with_slurm(python: str, logs: Path, parameters: dict[str, Any], num_tasks: int, at_once: int) -> None:
    """Raise UserError where Slurm would refuse a job array of submitit's with these parameters."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{python} -u -m submitit.core._submit {shlex.quote(str(logs))}"
    array = {"map_count": num_tasks, "array_parallelism": at_once} if num_tasks > 1 else {}
    check_script(_make_sbatch_string(command=command, folder=logs, **parameters, **array))


def check_script(text: str) -> None:
    """Raise UserError with Slurm's words where it would refuse the script."""
    taken, words = slurm.would_take(text)
    if not taken:
        raise UserError(f"Slurm would refuse the job: {words}")
