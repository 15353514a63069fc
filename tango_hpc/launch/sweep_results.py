"""The results of a sweep: a table, best first, in the terminal, as Parquet, and in one HTML page with a plot."""

from __future__ import annotations

import base64
import html
import io
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tango_hpc.files import write_atomically
from tango_hpc.launch.sweep import Sweep, cell_states, label_of
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


@dataclass(frozen=True)
class Group:
    """The cells that differ in their seed only. `values` are the metric's, of those that have it."""

    label: str
    settings: dict[str, Any]
    values: list[float]
    states: list[str]

    @property
    def mean(self) -> float | None:
        """Mean of the metric over seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


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
        one = groups.setdefault(key, Group(label_of(result.settings), result.settings, [], []))
        one.states.append(result.state)
        if result.state == "done" and metric in result.numbers:
            one.values.append(result.numbers[metric])
    sign = -1 if goal == "max" else 1
    return sorted(groups.values(), key=lambda one: (one.mean is None, sign * (one.mean or 0.0)))


def show_results(sweep: Sweep, console: Console) -> None:
    """Prints the table, and writes DIR/results.parquet and DIR/results.html."""
    settings = sweep.settings
    results = collect(sweep)
    groups = group(results, settings.metric, settings.goal)
    table = Table(title=Text(f"{settings.metric} of {settings.dir}"), title_justify="left")
    for title, justify in (("settings", "left"), ("mean", "right"), ("± over seeds", "right"), ("cells", "left")):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for one in groups:
        table.add_row(*map(Text, (one.label, _number(one.mean), _number(one.spread), _count(one.states))))
    console.print(table)
    for result in results:
        if result.state in ("failed", "lost"):
            console.print(f"cell {result.index} {result.state}: {result.detail}", markup=False, highlight=False)
    _write_parquet(settings.dir / "results.parquet", results)
    _write_html(settings.dir / "results.html", sweep, groups, results)
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
    import pyarrow.parquet as pq

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
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def _write_html(path: Path, sweep: Sweep, groups: list[Group], results: list[CellResult]) -> None:
    settings = sweep.settings
    rows = "".join(
        f"<tr><td>{html.escape(one.label)}</td><td>{_number(one.mean)}</td><td>{_number(one.spread)}</td>"
        f"<td>{html.escape(_count(one.states))}</td></tr>"
        for one in groups
    )
    cells = "".join(
        f"<tr><td>{result.index}</td><td>{html.escape(label_of(result.settings))}</td><td>{result.seed}</td>"
        f"<td>{result.state}</td><td>{_number(result.numbers.get(settings.metric))}</td>"
        f"<td>{html.escape(result.detail)}</td></tr>"
        for result in results
    )
    page = f"""<!doctype html><meta charset="utf-8"><title>Sweep {html.escape(settings.dir.name)}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;margin:1rem 0}}td,th{{padding:.3rem .8rem;border-bottom:1px solid #ccc;text-align:left}}
img{{max-width:100%}}</style>
<h1>{html.escape(settings.metric)}</h1><p>{html.escape(str(settings.dir))}, best first</p>
<img alt="{html.escape(settings.metric)} by settings" src="data:image/png;base64,{_plot(groups, settings.metric)}">
<table><tr><th>settings</th><th>mean</th><th>± over seeds</th><th>cells</th></tr>{rows}</table>
<h2>Cells</h2><table><tr><th>cell</th><th>settings</th><th>seed</th><th>state</th><th>{html.escape(settings.metric)}</th>
<th></th></tr>{cells}</table>
"""
    write_atomically(path, page)


def _plot(groups: list[Group], metric: str) -> str:
    """One row per setting: its seeds as dots, their mean as a bar; base64 of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.35 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for row, one in enumerate(reversed(groups)):
        if one.mean is not None:
            axes.barh(row, one.mean, color="#c8d8ee", height=0.7)
            axes.plot(one.values, [row] * len(one.values), "o", color="#1f4e8c", markersize=5)
    axes.set_yticks(range(len(groups)), [one.label for one in reversed(groups)])
    axes.set_xlabel(metric)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return base64.b64encode(stream.getvalue()).decode()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _count(states: list[str]) -> str:
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
