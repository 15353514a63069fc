"""The half-billion model under Tango and GRPO alone (docs/reproduce.md, section 8): python docs/figures/half_billion.py

Draws what those runs have left in the folder beside this file: the curves of Tango as `tango report` draws a run that
is there, and both arms beside each other. Prints what the page's table says of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from tango_hpc.base.files import read_json, read_json_lines
from tango_hpc.questions.benchmarks.estimates import Estimate, share
from tango_hpc.report.figures import COLORS, STYLE
from tango_hpc.report.plots import save_curves

DATA = Path(__file__).parent / "half_billion"
ROLLOUTS = 4  # of each question
# Folders beside this file: their name in the picture, colour and line.
ARMS = {
    "tango": ("Tango, seed 0", "generator", "-"),
    "alone": ("GRPO alone, seed 0", "other", "-"),
    "alone_seed_1": ("GRPO alone, seed 1", "other", ":"),
}
EVALUATED = {"start": ("before", "ink", "-"), **ARMS}


def sampled(folder: str, parts: int) -> list[Estimate]:
    """Share of right ones of all solutions that the generator sampled in each of `parts` equal parts of its steps."""
    rows = [row for row in read_json_lines(DATA / folder / "metrics.jsonl") if row.get("role") == "generator"]
    counts = [ROLLOUTS * row["data/questions_drawn"] for row in rows]
    rights = [round(row["generator/accuracy"] * count) for row, count in zip(rows, counts, strict=True)]
    pairs = zip(np.sum(np.split(np.array(rights), parts), 1), np.sum(np.split(np.array(counts), parts), 1), strict=True)
    return [share([True] * right + [False] * (count - right)) for right, count in pairs]


def greedy(folder: str) -> Estimate:
    """Share of the held-out questions answered right greedily."""
    (result,) = read_json(DATA / folder / "results.json").values()
    return Estimate(**result["task"]["estimates"]["pass@1"])


def draw(out: Path) -> None:
    """Right answers among the sampled solutions, by tens of generator steps, and greedy ones to all questions."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for folder, (name, color, line) in ARMS.items():
        shares = [100 * ten.value for ten in sampled(folder, 4)]
        left.plot([10, 20, 30, 40], shares, line, marker="o", color=COLORS[color], label=name)
    left.set(title="Sampled solutions, by tens of steps", xlabel="generator step", ylabel="right (%)")
    left.set_xticks([10, 20, 30, 40])
    left.set_ylim(0, None)
    left.legend(loc="lower right")
    for place, (folder, (_, color, _)) in enumerate(EVALUATED.items()):
        estimate = greedy(folder)
        error = [[100 * (estimate.value - estimate.low)], [100 * (estimate.high - estimate.value)]]
        right.errorbar(100 * estimate.value, place, xerr=error, marker="o", color=COLORS[color], capsize=3)
    right.set_yticks(range(len(EVALUATED)), [name for name, _, _ in EVALUATED.values()])
    right.set(title="Greedy, all 422 held-out questions", xlabel="right (%), with 95% intervals")
    right.set(xlim=(0, 45), ylim=(len(EVALUATED) - 0.5, -0.5))
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    save_curves(
        DATA.with_name("half_billion_curves.png"),
        *(read_json_lines(DATA / f"tango/{name}.jsonl") for name in ("metrics", "evaluations")),
    )
    with rc_context(STYLE):
        draw(DATA.with_name("half_billion_arms.png"))
    print(f"before: greedy {greedy('start')}")
    for folder, (name, _, _) in ARMS.items():
        first, last = sampled(folder, 2)
        rows = [row for row in read_json_lines(DATA / folder / "metrics.jsonl") if row.get("role")]
        tokens, seconds = (sum(row[key] for row in rows) for key in ("tokens/generated", "seconds/total"))
        print(
            f"{name}: greedy {greedy(folder)}, sampled {first} and {last}, "
            f"{tokens / 1e3:.0f} thousand tokens, {seconds / 60:.0f} minutes"
        )
