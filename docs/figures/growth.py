"""How costs grow with the work: python docs/figures/growth.py [BENCH.json] [OUT.svg]

Draws what `python -m tools.bench growth --out BENCH.json` found, seconds over size, both logarithmic, with the fitted
exponents.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from tango_hpc.report.figures import STYLE

DOCS = Path(__file__).parents[1]


def draw(measured: Path, out: Path) -> None:
    """One panel for each size that grew; the grey line is proportional to the size, from the first point on."""
    rows = [row for row in json.loads(measured.read_text())["comparisons"] if row["name"].startswith("growth-")]
    rows = [row for row in rows if "," not in row["name"]]
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    for axes, row in zip(figure.subplots(2, 4).flat, rows, strict=True):
        sizes, seconds = zip(*row["details"]["points"], strict=True)
        axes.loglog(sizes, [seconds[0] * size / sizes[0] for size in sizes], color="0.8", label="in proportion")
        axes.loglog(sizes, seconds, marker="o", color="C0", label=f"exponent {row['ratio']:.2f}")
        axes.set(title=row["name"].removeprefix("growth-").replace("-", " "), ylabel="seconds")
        axes.minorticks_off()
        axes.set_xticks(sizes, [_short(size) for size in sizes])
        axes.set_yticks([seconds[0], seconds[-1]], [f"{value:.2g}" for value in (seconds[0], seconds[-1])])
        axes.legend(loc="upper left")
    figure.savefig(out, metadata={"Date": None})


def _short(size: float) -> str:
    return f"{size / 1e6:.2g}M" if size >= 1e6 else f"{size / 1e3:.3g}k" if size >= 1e4 else f"{size:g}"


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    with rc_context({**STYLE, "svg.hashsalt": "growth"}):  # the same file from the same figures
        draw(*(given + [DOCS / "measurements/growth.json", DOCS / "figures/growth.svg"][len(given) :]))
