"""The commands that start runs elsewhere and look after them: submit, sweep, status, logs, cancel, stop, doctor."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from tango_hpc.base.errors import StoppedEarly, UserError
from tango_hpc.commands.arguments import ConfigFile, Overrides, ProfileName, Resume, RunOrFolder

Cluster = Annotated[
    Literal["slurm", "local", "debug"],
    typer.Option(help="slurm; local: in the background here; debug: in this process."),
]


def submit(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="sft, train, eval or teacher; several as sft,train.")],
    config: ConfigFile,
    overrides: Overrides = None,
    profile: ProfileName = None,
    cluster: Cluster = "slurm",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the sbatch script and Slurm's answer to it; submit nothing.")
    ] = False,
    resume: Resume = False,
) -> None:
    """Submit stages as a batch job, which saves when its time runs out, requeues itself and continues.

    Example: `tango submit sft,train configs/quickstart.yaml run.dir=$SCRATCH/run --profile generic`
    """
    from tango_hpc.base.config import load_config
    from tango_hpc.base.run.directory import RunDirectory
    from tango_hpc.commands import submit as submission
    from tango_hpc.commands.dry_run import show_submission
    from tango_hpc.commands.profiles import load_profile
    from tango_hpc.commands.resources import asked_of_a_node, node_memory
    from tango_hpc.runner.snapshot import describe_snapshot
    from tango_hpc.stages.stage import stages_named

    settings, chosen = load_config(config, overrides or []), load_profile(profile)
    memory = node_memory([settings], stages_named(stage), chosen)
    asked = f"Each node is asked for {asked_of_a_node(settings, chosen, memory)}."
    if dry_run:
        show_submission(stage, settings, chosen, cluster, asked, resume=resume)
        return
    job = submission.submit(stage, settings, profile=profile, cluster=cluster, resume=resume)
    typer.echo(f"Submitted as {'job' if cluster == 'slurm' else 'process'} {job.job_id}: {settings.run.dir}")
    if cluster == "slurm":
        typer.echo(asked)
    if cluster != "debug":
        typer.echo(describe_snapshot(RunDirectory(settings.run.dir).snapshot))
    run = shlex.quote(str(settings.run.dir))
    typer.echo(f"Watch it with: tango status {run}  or  tango logs {run} --follow")
    local = submission.node_local_paths(settings)
    if cluster == "slurm" and local:
        typer.echo(
            f"Note: {', '.join(local)}: by the name of the folder on a disk of this machine alone; compute nodes need "
            "storage that all of them share.",
            err=True,
        )
    if cluster == "debug":
        job.result()
        if submission.was_stopped(settings):
            raise typer.Exit(StoppedEarly.exit_code)


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="SWEEP.yaml", help="YAML file with the settings that vary and the folder of the runs."),
    ],
    profile: ProfileName = None,
    cluster: Annotated[
        Literal["slurm", "local", "debug"],
        typer.Option(help="slurm; local: here, one cell after the other; debug: in this process."),
    ] = "slurm",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List and check the cells; submit nothing.")] = False,
    resubmit: Annotated[
        bool, typer.Option("--resubmit", help="Submit cells again that failed or did not finish.")
    ] = False,
    results: Annotated[
        bool, typer.Option("--results", help="Show the results so far; write Parquet and HTML.")
    ] = False,
) -> None:
    """Submit a grid or a list of settings as a job array; each cell is a run of its own.

    Example: `tango sweep configs/experiments/alpha.yaml --profile generic`, later `tango sweep … --results`
    """
    from rich.console import Console

    from tango_hpc.commands.profiles import load_profile
    from tango_hpc.commands.sweep import list_cells, load_sweep
    from tango_hpc.commands.sweep_results import show_results
    from tango_hpc.commands.sweep_submit import cells_to_submit, check_sweep, submit_sweep

    plan = load_sweep(file)
    console = Console()
    if results:
        show_results(plan, console)
        return
    if dry_run:
        list_cells(plan, console)
        cells = cells_to_submit(plan, console, resubmit=resubmit)
        arrays = check_sweep(plan, cells, console, load_profile(profile), cluster) if cells else []
        typer.echo(f"To be submitted: {len(cells)} cells as {len(arrays)} job array(s).")
        return
    raise typer.Exit(submit_sweep(plan, console, profile=profile, cluster=cluster, resubmit=resubmit))


def status(
    run: RunOrFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh every few seconds until all runs have ended.")
    ] = False,
) -> None:
    """Show the state of a run, or of every run below a folder.

    Example: `tango status runs --watch`
    """
    from rich.console import Console

    from tango_hpc.commands.status_table import show_status

    if as_json and watch:
        raise UserError("--json is for scripts and --watch for people: give one of them")
    show_status(run, Console(), as_json=as_json, watch=watch)


def logs(
    run: RunOrFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the run has ended.")] = False,
    rank: Annotated[int | None, typer.Option(help="Show the log of this rank alone.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 30,
) -> None:
    """Show the cause of a failure, the attempts of a run, and the ends of its logs.

    Example: `tango logs runs/mine --follow`
    """
    from rich.console import Console

    from tango_hpc.commands.status import show_logs

    show_logs(run, Console(), rank=rank, lines=lines, follow=follow)


def cancel(run: RunOrFolder) -> None:
    """Cancel the job of a run. The run still saves if the cluster gives it time.

    Example: `tango cancel runs/mine`
    """
    from rich.console import Console

    from tango_hpc.commands.ending import cancel as end

    end(run, Console())


def stop(run: RunOrFolder) -> None:
    """Stop a run after it has saved; `--resume` continues it.

    Example: `tango stop runs/mine`
    """
    from rich.console import Console

    from tango_hpc.commands.ending import stop as ask

    ask(run, Console())


def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file whose models and data are checked too.")
    ] = None,
    overrides: Overrides = None,
    profile: ProfileName = None,
    stage: Annotated[
        str,
        typer.Option(
            "--stage", help="Stages that CONFIG is checked for: sft, train, eval or teacher; several as sft,train."
        ),
    ] = "sft,train",
    rates: Annotated[
        bool,
        typer.Option("--rates", help="Measure this CPU by small runs, launched as CONFIG: seconds for `tango plan`."),
    ] = False,
) -> None:
    """Check this machine, or the allocation in which the command runs, and say how to mend what is wrong.

    Example: `salloc --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 tango doctor CONFIG --profile generic`
    """
    from rich.console import Console

    from tango_hpc.commands.doctor import examine
    from tango_hpc.commands.measure_rates import measure_rates

    if rates:
        measure_rates(config, overrides or [], Console())
        return
    raise typer.Exit(examine(config, overrides or [], profile, stage, Console()))


def add_commands(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    for command in (submit, sweep, status, logs, cancel, stop, doctor):
        app.command()(command)
