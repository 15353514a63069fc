"""The results of a sweep: a table, best first, in the terminal, as Parquet, and in one HTML page with a plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_parquet
from tango_hpc.base.formats import number, say
from tango_hpc.base.run.summary import read_summary
from tango_hpc.commands.sweep import Sweep, known_states
from tango_hpc.report.sweep import CellResult, group, write_sweep_page


def collect(sweep: Sweep) -> list[CellResult]:
    """Return the results of every cell so far."""
    found = known_states(sweep)
    results = []
    for cell in sweep.cells:
        state = found.get(cell.index)
        brought = (
            (state.state, state.detail, dict(_numbers(read_summary(cell.directory)))) if state else ("new", "", {})
        )
        results.append(CellResult(cell.index, cell.settings, cell.seed, str(cell.directory.path), *brought))
    return results


def show_results(sweep: Sweep, console: Console) -> None:
    """Print the table; write DIR/results.parquet and DIR/results.html."""
    settings = sweep.settings
    if not settings.dir.is_dir():
        raise UserError(
            f"no cell of {sweep.file} was started here: there is no folder {settings.dir} (dir of the sweep, from the "
            "folder that the command is called in)"
        )
    results = collect(sweep)
    groups = group(results, settings.metric, settings.goal)
    table = Table(title=Text(f"{settings.metric} of {settings.dir}"), title_justify="left")
    for title, justify in (("settings", "left"), ("mean", "right"), ("± over seeds", "right"), ("cells", "left")):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for equal in groups:
        table.add_row(*map(Text, (equal.label, number(equal.mean), number(equal.spread), equal.count)))
    console.print(table)
    for cell, result in zip(sweep.cells, results, strict=True):
        if result.state in ("failed", "lost"):
            say(console, f"cell {cell.name} {result.state}: {result.detail}")
        if cell.exists and (changes := cell.changes()):
            told = "; ".join(map(str, changes))
            say(console, f"cell {cell.name} ran with other settings than {sweep.file} has now: {told}")
    if strangers := sweep.strangers():
        say(
            console,
            f"{len(strangers)} runs that {sweep.file} no longer names are left out: {', '.join(map(str, strangers))}",
        )
    _write_parquet(settings.dir / "results.parquet", results)
    write_sweep_page(settings.dir / "results.html", settings.dir, settings.metric, groups, results)
    say(console, f"Written: {settings.dir / 'results.parquet'}, {settings.dir / 'results.html'}")


def _numbers(tree: Any, prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            if key not in ("versions", "stages"):
                yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, float(value)


def _write_parquet(path: Path, results: list[CellResult]) -> None:
    import pyarrow as pa

    keys = sorted({key for result in results for key in result.settings})
    names = sorted({name for result in results for name in result.numbers})
    columns: dict[str, Any] = {"cell": [result.index for result in results]}
    columns |= {name: [getattr(result, name) for result in results] for name in ("seed", "state", "detail", "run")}
    # Settings as text: one grid may mix numbers, words and null in a column.
    columns |= {f"setting/{key}": [str(result.settings.get(key)) for result in results] for key in keys}
    columns |= {f"result/{name}": [result.numbers.get(name) for result in results] for name in names}
    write_parquet(path, pa.table(columns))
