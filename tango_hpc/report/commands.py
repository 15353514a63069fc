"""The commands that read what a run has written: report and rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]


def report(run: RunDir) -> None:
    """Write RUN/report.html: curves, results and a few judged rollouts in one file. Works on unfinished runs too.

    Example: `tango report runs/quickstart`
    """
    from tango_hpc.report.run_page import write_report
    from tango_hpc.run.directory import RunDirectory

    directory = RunDirectory.open(run)
    write_report(directory)
    typer.echo(directory.report)


def rollouts(
    run: RunDir,
    step: Annotated[int | None, typer.Option(help="Optimizer step; default: the last one that was dumped.")] = None,
    role: Annotated[str, typer.Option(help="generator or verifier.")] = "generator",
    limit: Annotated[int, typer.Option(min=1, help="Responses to show.")] = 4,
) -> None:
    """Read rollouts in the terminal: question, steps, judgements in colour, rewards and advantages.

    Example: `tango rollouts runs/quickstart --step 20`
    """
    from tango_hpc.report.reading import show_rollouts
    from tango_hpc.run.directory import RunDirectory

    show_rollouts(RunDirectory.open(run), step=step, role=role, limit=limit)


def add_commands(app: typer.Typer) -> None:
    """Make them commands of `tango`."""
    for command in (report, rollouts):
        app.command()(command)
