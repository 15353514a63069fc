"""results.html of a sweep: the settings with a plot, best first, and every cell."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tango_hpc.base.files import write_atomically
from tango_hpc.base.formats import label_of
from tango_hpc.report.html import render


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

    @property
    def label(self) -> str:
        """Its settings in one line."""
        return label_of(self.settings)


@dataclass(frozen=True)
class Group:
    """The cells that differ in their seed only. `values` are the metric's, of those that have it."""

    label: str
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

    @property
    def count(self) -> str:
        """Return how many of the cells are in which state, and how many of those that are done have the metric, if not
        all.
        """
        told = ", ".join(f"{self.states.count(state)} {state}" for state in dict.fromkeys(self.states))
        done = self.states.count("done")
        return told if len(self.values) == done else f"{told} ({len(self.values)} with a value)"


def group(results: Iterable[CellResult], metric: str, goal: str) -> list[Group]:
    """Return cells with equal settings together, the best mean first; those without a result last."""
    groups: dict[str, Group] = {}
    for result in results:
        key = repr(sorted(result.settings.items()))
        equal = groups.setdefault(key, Group(result.label, [], []))
        equal.states.append(result.state)
        if result.state == "done" and metric in result.numbers:
            equal.values.append(result.numbers[metric])
    sign = -1 if goal == "max" else 1
    return sorted(groups.values(), key=lambda equal: (equal.mean is None, sign * (equal.mean or 0.0)))


def write_sweep_page(
    path: Path, folder: Path, metric: str, groups: Sequence[Group], results: Sequence[CellResult]
) -> None:
    """Write the page of the sweep in `folder`, with the groups in this order."""
    values = {"groups": groups, "results": results, "drawing": _drawing(groups, metric)}
    write_atomically(path, render("sweep.html", title=f"Sweep {folder.name}", folder=folder, metric=metric, **values))


def _drawing(groups: Sequence[Group], metric: str) -> Markup:
    """Return one row per setting: its seeds as dots, their mean as a bar."""
    from matplotlib import rc_context  # takes a while, and who looks at the table in the terminal should not wait
    from matplotlib.figure import Figure

    from tango_hpc.report.figures import COLORS, STYLE, svg

    with rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.35 * len(groups)), layout="constrained")
        axes = figure.subplots()
        for row, group in enumerate(reversed(groups)):
            if group.mean is not None:
                axes.barh(row, group.mean, color=COLORS["generator"], alpha=0.3, height=0.7)
                axes.plot(group.values, [row] * len(group.values), "o", color=COLORS["generator"], markersize=5)
        axes.set_yticks(range(len(groups)), [group.label for group in reversed(groups)])
        axes.set_ylim(-0.6, len(groups) - 0.4)  # room for rows without a result too
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(metric)
        return svg(figure, f"{metric} by settings")
