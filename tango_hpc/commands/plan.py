"""The command that looks ahead: plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tango_hpc.base.errors import UserError
from tango_hpc.commands.arguments import ConfigFile, Overrides
from tango_hpc.plan.cards import CARDS, GPU_DEFAULT


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    stage: Annotated[
        Literal["train", "eval", "teacher"], typer.Option(help="Stage to plan; sft needs less than train.")
    ] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="CARD", help=f"GPU: {', '.join(CARDS)}; default: this machine's, else {GPU_DEFAULT}."),
    ] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(min=1, help="Memory of one GPU, in GiB, in place of the card's.")
    ] = None,
    node_gb: Annotated[
        float | None,
        typer.Option(min=1, help="Host memory of one node, in GiB; default: with launch.device cpu, this machine's."),
    ] = None,
    response_tokens: Annotated[
        str | None, typer.Option(metavar="N[,N]", help="Mean tokens of a solution, and of a verification.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Take the lengths that this run has measured.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Time limit of a job, as 12:00:00: how many jobs.")
    ] = None,
) -> None:
    """Predict the memory, seconds and disk of a run. Exit code 2 if the run cannot fit, with what to change.

    Needs no GPU and loads no weights: a model's config.json is enough, or for well-known models not even that.

    Example: `tango plan configs/paper/1x4/qwen_grpo_tango.yaml --gpu H100 --at 24:00:00`
    """
    from rich.console import Console

    from tango_hpc.base.config import load_config
    from tango_hpc.commands.plan_report import make_plan, show_plan
    from tango_hpc.commands.plan_time import time_report
    from tango_hpc.plan.here import find_machine
    from tango_hpc.plan.host import memory_of_this_machine
    from tango_hpc.plan.lengths import choose_load
    from tango_hpc.stages.stage import STAGES

    loaded = load_config(config, overrides or [])
    if node_gb is None and loaded.launch.device == "cpu":
        node_gb = memory_of_this_machine()
    machine = find_machine(loaded, gpu, gpu_gb)
    memory = gpu_gb or (machine.memory_gib if machine is not None else None) or CARDS[GPU_DEFAULT].memory_gib
    found = make_plan(loaded, gpu_gb=memory, node_gb=node_gb, stage=STAGES[stage])
    if stage == "train" and machine is not None:
        found["time"] = time_report(loaded, machine, choose_load(loaded, response_tokens, lengths), at)
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
