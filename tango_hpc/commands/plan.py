"""The commands that look ahead: init and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tango_hpc.base.errors import UserError
from tango_hpc.commands.arguments import ConfigFile, Overrides, ProfileName
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

    Example: `tango plan configs/paper/qwen.yaml configs/machines/1x4.yaml --gpu H100 --at 24:00:00`
    """
    from rich.console import Console

    from tango_hpc.base.config import load_config
    from tango_hpc.commands.plan_report import make_plan, show_plan
    from tango_hpc.commands.plan_time import time_report
    from tango_hpc.plan.here import find_machine
    from tango_hpc.plan.host import memory_of_this_machine
    from tango_hpc.plan.lengths import choose_load
    from tango_hpc.stages.stage import STAGES, TRAIN

    loaded = load_config(config, overrides or [])
    if node_gb is None and loaded.launch.device == "cpu":
        node_gb = memory_of_this_machine()
    machine = find_machine(loaded, gpu, gpu_gb)
    memory = gpu_gb or (machine.memory_gib if machine is not None else None) or CARDS[GPU_DEFAULT].memory_gib
    found = make_plan(loaded, gpu_gb=memory, node_gb=node_gb, stage=STAGES[stage])
    if STAGES[stage] is TRAIN and machine is not None:
        found["time"] = time_report(loaded, machine, choose_load(loaded, response_tokens, lengths), at)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show_plan(found, Console(highlight=False))
    if found["problems"]:
        raise UserError("this cannot fit:\n" + "\n".join(f"  - {problem}" for problem in found["problems"]))
    if not as_json:
        typer.echo("This fits.")


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="File to write.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings that the file shall have.")
    ] = None,
    generator: Annotated[
        str, typer.Option(metavar="MODEL", help="A folder, a published name, or an id in the cache of Hugging Face.")
    ] = "",
    verifier: Annotated[
        str, typer.Option(metavar="MODEL|same|none", help="same: one model in both roles; none: outcome rewards alone.")
    ] = "",
    gpus: Annotated[
        str | None,
        typer.Option(metavar="NxCARD", help=f"GPUs of a node, as 4xA100-80, or cpu. Cards: {', '.join(CARDS)}."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Training questions, a Parquet file.")] = None,
    profile: ProfileName = None,
    adapters: Annotated[bool, typer.Option("--adapters", help="Train low-rank adapters.")] = False,
    node_gb: Annotated[float | None, typer.Option(min=1, help="Host memory of a node, in GiB.")] = None,
    task: Annotated[bool, typer.Option("--task", help="Write a task file to fill in instead (FILE.py).")] = False,
) -> None:
    """Write a short configuration that fits a machine, with the reason for each line; or a task file.

    Example: `tango init run.yaml --generator Qwen3-4B --verifier Qwen3-4B --gpus 4xA100-80`
    """
    from rich.console import Console

    from tango_hpc.commands.init import Asked, write_config, write_task
    from tango_hpc.commands.profiles import load_profile

    if task:
        write_task(file)
        return
    if not generator or not verifier:
        raise UserError("give --generator MODEL and --verifier MODEL (or same, or none)")
    asked = Asked(generator, verifier, gpus, nodes, data, adapters, settings or [], node_gb)
    write_config(file, asked, load_profile(profile), Console(highlight=False))


def add_commands(app: typer.Typer) -> None:
    """Make them commands of `tango`."""
    app.command()(init)
    app.command()(plan)
