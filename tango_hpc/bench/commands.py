"""The command that measures: bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tango_hpc.errors import UserError


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to measure: reshard.")],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Model (the generator), layouts and ranks.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the measurements.")] = None,
) -> None:
    """Measure against what else could be used, on this machine, in one run.

    reshard: bring new weights into the engine shard to shard, by gathering full tensors, and over the disk.

    Example: `tango bench reshard configs/bench_reshard.yaml`
    """
    from tango_hpc.bench.reshard import render, run_bench
    from tango_hpc.config import load_config

    if name != "reshard":
        raise UserError(f"there is no benchmark {name!r}; there is: reshard")
    result = run_bench(load_config(config, overrides or []))
    typer.echo(render(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


def add_commands(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(bench)
