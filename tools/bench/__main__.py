"""Measure tango_hpc against what else could be used, on this machine: `python -m tools.bench NAME`, in a checkout."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tango_hpc.base.errors import UserError


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="What to measure; see --list.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name what can be measured.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="reshard: model (the generator), layouts and ranks of this configuration.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Setting of --config (repeatable).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each side is measured, after a warm-up.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file for the measurements (docs/performance.md).")] = None,
) -> None:
    """Measure against what else could be used, on this machine, the sides in turn.

    Example: `python -m tools.bench update rollout --out bench.json`
    """
    from tools.bench.catalogue import COMPARISONS

    if list_ or not names:
        for name, comparison in COMPARISONS.items():
            typer.echo(f"{name:10} {comparison.what}, against {comparison.against}")
        return
    unknown = [name for name in names if name not in COMPARISONS]
    if unknown:
        raise UserError(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(COMPARISONS)}")
    if config is not None and names != ["reshard"]:
        raise UserError(f"--config is for reshard alone; leave it out, or measure {', '.join(names)} without reshard")
    if set_ and config is None:
        raise UserError("--set changes settings of --config, which is not given")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.absolute().parent}")
    if config is not None:
        from tango_hpc.base.config import load_config
        from tools.bench.reshard import render, run_bench

        result = run_bench(load_config(config, set_ or []), repeats)
        text = render(result)
    else:
        from tools.bench.measure import machine, report, table

        on = machine()
        rows = []
        for name in dict.fromkeys(names):
            typer.echo(f"measuring {name} ...", err=True)
            with tempfile.TemporaryDirectory(prefix="tango-bench-") as folder:
                rows += COMPARISONS[name].load()(Path(folder), repeats)
        result = report(on, rows)
        text = (
            f"{on['cpu']}, {on['cores']} cores, load {on['load_before']:.1f} before; medians of"
            f" {repeats}\n\n{table(rows)}"
        )
    typer.echo(text)
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    """Measure what the command line names; 2 for bad input."""
    try:
        typer.run(bench)
    except UserError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
