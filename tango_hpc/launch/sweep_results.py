"""The results of a sweep: a table, best first, in the terminal, as Parquet, and in one HTML page with a plot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tango_hpc.files import write_parquet
from tango_hpc.launch.sweep import Sweep, cell_states, label_of
from tango_hpc.report.formats import number
from tango_hpc.report.sweep import Group, write_sweep_page
from tango_hpc.run.summary import read_summary


@dataclass(frozen=True)
class CellResult:
    """One cell's end: its numbers are those of summary.json, by dotted name."""

    index: int
    settings: dict[str, Any]
    seed: int
    run: str
    state: str
    detail: str
    numbers: dict[str, float]


def collect(sweep: Sweep) -> list[CellResult]:
    """What every cell has brought so far."""
    results = []
    started = [cell for cell in sweep.cells if cell.directory.config.is_file()]
    found = dict(zip([cell.index for cell in started], cell_states(started), strict=True))
    for cell in sweep.cells:
        state = found.get(cell.index)
        numbers = dict(_numbers(read_summary(cell.directory))) if state is not None else {}
        results.append(
            CellResult(
                cell.index,
                cell.settings,
                cell.seed,
                str(cell.directory.path),
                state.state if state else "new",
                state.detail if state else "",
                numbers,
            )
        )
    return results


def group(results: Iterable[CellResult], metric: str, goal: str) -> list[Group]:
    """Cells with equal settings together, the best mean first; those without a result last."""
    groups: dict[str, Group] = {}
    for result in results:
        key = repr(sorted(result.settings.items()))
        equal = groups.setdefault(key, Group(label_of(result.settings), [], []))
        equal.states.append(result.state)
        if result.state == "done" and metric in result.numbers:
            equal.values.append(result.numbers[metric])
    sign = -1 if goal == "max" else 1
    return sorted(groups.values(), key=lambda equal: (equal.mean is None, sign * (equal.mean or 0.0)))


def show_results(sweep: Sweep, console: Console) -> None:
    """Print the table; write DIR/results.parquet and DIR/results.html."""
    settings = sweep.settings
    results = collect(sweep)
    groups = group(results, settings.metric, settings.goal)
    table = Table(title=Text(f"{settings.metric} of {settings.dir}"), title_justify="left")
    for title, justify in (("settings", "left"), ("mean", "right"), ("± over seeds", "right"), ("cells", "left")):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for equal in groups:
        table.add_row(*map(Text, (equal.label, number(equal.mean), number(equal.spread), equal.count)))
    console.print(table)
    for result in results:
        if result.state in ("failed", "lost"):
            console.print(f"cell {result.index} {result.state}: {result.detail}", markup=False, highlight=False)
    _write_parquet(settings.dir / "results.parquet", results)
    cells = [
        (cell.index, label_of(cell.settings), cell.seed, cell.state, cell.numbers.get(settings.metric), cell.detail)
        for cell in results
    ]
    write_sweep_page(settings.dir / "results.html", settings.dir, settings.metric, groups, cells)
    written = f"Written: {settings.dir / 'results.parquet'}, {settings.dir / 'results.html'}"
    console.print(written, markup=False, highlight=False, soft_wrap=True)


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
    columns: dict[str, Any] = {
        "cell": [result.index for result in results],
        "seed": [result.seed for result in results],
        "state": [result.state for result in results],
        "detail": [result.detail for result in results],
        "run": [result.run for result in results],
    }
    # Settings as text: one grid may mix numbers, words and null in a column.
    columns |= {f"setting/{key}": [str(result.settings.get(key)) for result in results] for key in keys}
    columns |= {f"result/{name}": [result.numbers.get(name) for result in results] for name in names}
    write_parquet(path, pa.table(columns))
