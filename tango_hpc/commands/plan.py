"""The command that looks ahead: plan."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from tango_hpc.base.errors import UserError
from tango_hpc.commands.arguments import ConfigFile, Overrides


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    stage: Annotated[
        Literal["train", "eval", "teacher"], typer.Option(help="Stage to plan; sft needs less than train.")
    ] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    gpu_gb: Annotated[float, typer.Option(min=1, help="Memory of one GPU, in GiB.")] = 80.0,
    node_gb: Annotated[
        float | None,
        typer.Option(min=1, help="Host memory of one node, in GiB; default: with launch.device cpu, this machine's."),
    ] = None,
) -> None:
    """Predict the memory, batches and disk of a run. Exit code 2 if the run cannot fit, with what to change.

    Needs no GPU and loads no weights: a model's config.json is enough, or for well-known models not even that.

    Example: `tango plan configs/quickstart.yaml`
    """
    from rich.console import Console

    from tango_hpc.base.config import load_config
    from tango_hpc.commands.plan_report import make_plan, show_plan
    from tango_hpc.plan.host import memory_of_this_machine
    from tango_hpc.stages.stage import STAGES

    loaded = load_config(config, overrides or [])
    if node_gb is None and loaded.launch.device == "cpu":
        node_gb = memory_of_this_machine()
    found = make_plan(loaded, gpu_gb=gpu_gb, node_gb=node_gb, stage=STAGES[stage])
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show_plan(found, Console(highlight=False))
    if found["problems"]:
        raise UserError("this cannot fit:\n" + "\n".join(f"  - {problem}" for problem in found["problems"]))
    if not as_json:
        typer.echo("This fits.")


def add_commands(app: typer.Typer) -> None:
    """Make it a command of `tango`."""
    app.command()(plan)
