"""The half-billion model under Tango and GRPO alone (docs/reproduce.md, section 8): python docs/figures/half_billion.py

Draws what those runs have left in the folder beside this file: the curves of Tango as `tango report` draws a run that is
there, and both arms beside each other.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from tango_hpc.files import read_json_lines
from tango_hpc.report.figures import COLORS, STYLE
from tango_hpc.report.plots import save_curves

DATA = Path(__file__).parent / "half_billion"
# Folders beside this file: their name in the picture, colour and line.
ARMS = {
    "tango": ("Tango", "generator", "-"),
    "alone": ("GRPO alone, seed 0", "other", "-"),
    "alone_seed_1": ("GRPO alone, seed 1", "other", ":"),
}


def draw(out: Path) -> None:
    """Right answers among the sampled solutions, by tens of generator steps, and among greedy ones to all held-out questions."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    sampled, greedy = figure.subplots(1, 2)
    for folder, (name, color, line) in ARMS.items():
        rows = [row for row in read_json_lines(DATA / folder / "metrics.jsonl") if row.get("role") == "generator"]
        drawn = np.array([row["data/questions_drawn"] for row in rows]).reshape(-1, 10)
        right = np.array([row["generator/accuracy"] for row in rows]).reshape(-1, 10)
        shares = 100 * (right * drawn).sum(1) / drawn.sum(1)
        sampled.plot(10 * np.arange(1, len(shares) + 1), shares, line, marker="o", color=COLORS[color], label=name)
    sampled.set(
        title="Sampled solutions, by tens of steps",
        xlabel="generator step",
        ylabel="right (%)",
        xticks=range(10, 41, 10),
    )
    sampled.set_ylim(0, None)
    sampled.legend(loc="lower right")
    evaluated = {"start": ("before", "ink", "-"), **ARMS}
    for place, (folder, (_, color, _)) in enumerate(evaluated.items()):
        (result,) = json.loads((DATA / folder / "results.json").read_text()).values()
        share = {key: 100 * value for key, value in result["task"]["estimates"]["pass@1"].items()}
        error = [[share["value"] - share["low"]], [share["high"] - share["value"]]]
        greedy.errorbar(share["value"], place, xerr=error, marker="o", color=COLORS[color], capsize=3)
    greedy.set_yticks(range(len(evaluated)), [name for name, _, _ in evaluated.values()])
    greedy.set(
        title="Greedy, all 422 held-out questions",
        xlabel="right (%), with 95% intervals",
        xlim=(0, 45),
        ylim=(len(evaluated) - 0.5, -0.5),
    )
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    save_curves(
        DATA.with_name("half_billion_curves.png"),
        *(read_json_lines(DATA / f"tango/{name}.jsonl") for name in ("metrics", "evaluations")),
    )
    with rc_context(STYLE):
        draw(DATA.with_name("half_billion_arms.png"))
