"""The commands that read what a run has written: report and rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tango_hpc.commands.arguments import RunDir


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a folder of runs such as a sweep's.")],
) -> None:
    """Write a report of a run, finished or not, to RUN/report.html: curves, results, a few judged rollouts.

    For a folder of runs, compare their arms over seeds: comparison.png, comparison.md, and curves.csv, from which both
    can be made again when the runs are gone.

    Example: `tango report runs/quickstart`
    """
    from tango_hpc.base.run.directory import RunDirectory

    if run.is_dir() and not (run / "config.yaml").exists():
        from tango_hpc.report.comparison_figure import write_comparison

        for path in write_comparison(run):
            typer.echo(path)
        return
    from tango_hpc.report.run_page import write_report

    directory = RunDirectory.open(run)
    write_report(directory)
    typer.echo(directory.report)


def rollouts(
    run: RunDir,
    step: Annotated[int | None, typer.Option(help="Optimizer step; default: the last one that was dumped.")] = None,
    role: Annotated[str, typer.Option(help="generator or verifier.")] = "generator",
    limit: Annotated[int, typer.Option(min=1, help="Responses to show.")] = 4,
) -> None:
    """Show saved rollouts: question, steps, judgements in colour, rewards and advantages.

    Example: `tango rollouts runs/quickstart --step 41`
    """
    from tango_hpc.base.run.directory import RunDirectory
    from tango_hpc.report.reading import show_rollouts

    show_rollouts(RunDirectory.open(run), step=step, role=role, limit=limit)


def add_commands(app: typer.Typer) -> None:
    """Make them commands of `tango`."""
    for command in (report, rollouts):
        app.command()(command)
