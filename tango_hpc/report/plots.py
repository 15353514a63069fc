"""The curves of a run: for the report as SVG, and as one PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tango_hpc.base.run.metrics import PHASES, TURNS, MetricsRow
from tango_hpc.report.figures import COLORS, STYLE, svg

ROLES = ("generator", "verifier")
# A phase with less of the time than this cannot be seen, and is in "other".
VISIBLE_SHARE = 0.002
_SEVERAL = ("generator", "third", "verifier", "logprobs", "reshard", "turns")  # colours for any number of lines


@dataclass(frozen=True)
class Line:
    """One curve: the values of `key`, of one role's rows only where `role` is given, or of the evaluations."""

    key: str
    label: str
    color: str
    role: str | None = None
    held_out: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart. It is left out where none of its lines has a value."""

    title: str
    caption: str
    lines: tuple[Line, ...] = ()
    scale: str = "linear"  # "share" (0 to 1, as percent), "log"
    draw: Callable[[Axes, Sequence[MetricsRow]], bool] | None = (
        None  # for what is no set of lines; False: nothing to show
    )


def by_role(key: str) -> tuple[Line, ...]:
    """Return the lines for `key` of the generator's and of the verifier's optimizer steps."""
    return tuple(Line(key, role, role, role=role) for role in ROLES)


def of_judgements(score: str) -> tuple[Line, ...]:
    """Return the lines for `score` of verdicts and step judgements, in training and held out."""
    return tuple(
        Line(f"verifier/{kind}_{score}", f"{label}, {where}", color, held_out=held_out)
        for kind, label, color in (("outcome", "outcome", "verifier"), ("step", "steps", "third"))
        for where, held_out in (("training batch", False), ("held out", True))
    )


def draw_phases(axes: Axes, rows: Sequence[MetricsRow]) -> bool:
    """Draw the seconds of each phase, stacked; one bar covers several steps where there are many."""
    rows = [row for row in rows if row.get("seconds/total")]
    if not rows:
        return False
    size = -(-len(rows) // 60)  # of every bar alike, so that none is further from its neighbour
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    x = np.array([np.mean([row["step"] for row in group]) for group in groups])
    width = 0.86 * (x[-1] - x[0]) / max(len(x) - 1, 1) if len(x) > 1 else 0.8
    bottom = np.zeros(len(groups))
    total = np.array([np.mean([row["seconds/total"] for row in group]) for group in groups])
    for label, phases in [*((phase, (phase,)) for phase in PHASES), ("turns", TURNS)]:
        seconds = [[sum(row.get(f"seconds/{phase}") or 0.0 for phase in phases) for row in group] for group in groups]
        height = np.array([np.mean(group) for group in seconds])
        if height.sum() > VISIBLE_SHARE * total.sum():
            axes.bar(x, height, width, bottom=bottom, color=COLORS[label], label=", ".join(phases), linewidth=0)
            bottom += height
    rest = np.clip(total - bottom, 0.0, None)
    if rest.any():
        axes.bar(x, rest, width, bottom=bottom, color=COLORS["other"], label="other", linewidth=0)
    axes.set_ylim(0, None)
    axes.grid(axis="x", visible=False)
    return True


def draw_throughput(axes: Axes, rows: Sequence[MetricsRow]) -> bool:
    """Draw the tokens generated and trained on per second of the whole step."""
    shown = False
    for key, label, color in (("tokens/generated", "generated", "rollout"), ("tokens/trained", "trained", "train")):
        points = [
            (row["step"], row[key] / row["seconds/total"]) for row in rows if row.get(key) and row.get("seconds/total")
        ]
        if points:
            _curve(axes, points, label, COLORS[color])
            shown = True
    axes.set_ylim(0, None)
    return shown


def draw_scores(axes: Axes, rows: Sequence[MetricsRow]) -> bool:
    """Draw the mean score of the answers, of a task that scores them, and of each named part."""
    parts = sorted({key for row in rows for key in row if key.startswith("reward_parts/")})
    shown = False
    for key, color in zip(("generator/score", *parts), cycle(_SEVERAL), strict=False):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            _curve(axes, points, key.rpartition("/")[2], COLORS[color])
            shown = True
    return shown


ACCURACY = Panel(
    "Generator accuracy",
    "Share of questions answered right: sampled, on the step's own questions; greedy, on held-out ones.",
    (
        Line("generator/accuracy", "training batch", "generator"),
        Line("generator/accuracy", "held out, greedy", "generator", held_out=True),
    ),
    scale="share",
)
VERIFIER_F1 = Panel(
    "Verifier F1",
    "Harmonic mean of the accuracy on right and on wrong ones; a verifier that always says the same scores 0. "
    "Held out, it judges the same solutions every time.",
    of_judgements("f1"),
    scale="share",
)
VERIFIER_PR_F1 = Panel(
    "Verifier F1, precision and recall",
    "Harmonic mean of precision and recall of the judgement that something is right, as the paper's authors plot it; "
    "where most is right, a verifier that calls everything right scores high.",
    of_judgements("pr_f1"),
    scale="share",
)
VERIFIER_J = Panel(
    "Verifier usefulness J",
    "Share of right ones judged right less share of wrong ones judged right. At 0 its judgements teach nothing, below "
    "they teach the wrong.",
    of_judgements("j"),
)
REWARDS = Panel(
    "Rewards",
    "Means over the responses of a step: right answer (Eq. 2), one step (Eq. 3), verifier (Eq. 8).",
    (
        Line("generator/outcome_reward", "generator, outcome", "generator"),
        Line("generator/step_reward", "generator, steps", "third"),
        Line("verifier/reward", "verifier", "verifier"),
    ),
)
LENGTHS = Panel(
    "Response length",
    "Mean tokens of a response.",
    (
        Line("generator/response_tokens", "solutions", "generator"),
        Line("verifier/response_tokens", "verifications", "verifier"),
    ),
)
SCORES = Panel("Scores", "Of the task, in the mean over the answers of a step, and their parts.", draw=draw_scores)
PHASE_TIMES = Panel("Time by phase", "Seconds of an optimizer step, by what they went into.", draw=draw_phases)
GAP = Panel(
    "Log-probability gap",
    "Mean |engine − trainer| over sampled tokens; weights that were not synced correctly show here first.",
    by_role("logprob_gap/mean_abs"),
    scale="log",
)

LOSS = Panel(
    "Loss",
    "Loss of each optimizer step; in fine-tuning, mean loss per response token.",
    (
        *by_role("loss"),
        *(Line(f"{role}/eval_loss", f"{role}, held out", role, held_out=True) for role in ROLES),
    ),
)

PANELS = (
    ACCURACY,
    VERIFIER_F1,
    VERIFIER_J,
    VERIFIER_PR_F1,
    REWARDS,
    SCORES,
    LENGTHS,
    Panel(
        "Verifier behaviour",
        "Share of solutions called correct, and of verifications that cannot be parsed.",
        (
            Line("verifier/correct_share", "called correct, training batch", "verifier"),
            Line("verifier/correct_share", "called correct, held out", "verifier", held_out=True),
            Line("verifier/parse_failures", "unparsable", "third"),
        ),
        scale="share",
    ),
    Panel(
        "Unusable solutions",
        "Share of solutions cut off at the length limit, and of those that break the format.",
        (
            Line("generator/truncated_share", "cut off", "generator"),
            Line("generator/format_failures", "bad format", "third"),
        ),
        scale="share",
    ),
    Panel(
        "Groups with a signal",
        "Share of groups (the rollouts of a question, the verifications of a solution) in which some token has an"
        " advantage other than 0: from the others nothing is learnt. And of solutions on which all verdicts agree.",
        (
            *by_role("groups_with_signal"),
            Line("verifier/agreeing_groups", "verdicts agree", "third"),
        ),
        scale="share",
    ),
    GAP,
    LOSS,
    Panel("Gradient norm", "Before clipping.", by_role("grad_norm"), scale="log"),
    Panel("KL to the reference", "Mean estimate per token.", by_role("kl")),
    Panel("Entropy", "Of the next-token distribution, mean per token, in nats.", by_role("entropy")),
    Panel("Clipped tokens", "Share of tokens whose ratio the loss clips.", by_role("loss/clip_share"), scale="share"),
    Panel("α", "Weight of the step advantages (Eq. 7).", (Line("alpha", "α", "generator"),)),
    Panel("Learning rate", "Of each role's optimizer.", by_role("learning_rate")),
    Panel(
        "Class weights",
        "s₊ and s₋ of Eq. 9, for solutions that are right and wrong.",
        (
            Line("verifier/class_weight_right", "right", "third"),
            Line("verifier/class_weight_wrong", "wrong", "verifier"),
        ),
    ),
    PHASE_TIMES,
    Panel("Throughput", "Tokens per second over the whole step, all ranks together.", draw=draw_throughput),
)
CURVES = (ACCURACY, VERIFIER_F1, REWARDS, LENGTHS, GAP, PHASE_TIMES, LOSS)  # the first six that have anything


def drawings(rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> list[tuple[Panel, Markup]]:
    """Return the panels that have something to show, as SVG."""
    drawn = []
    for panel in PANELS:
        with rc_context(STYLE):
            figure = Figure(figsize=(4.5, 2.5), layout="constrained")
            axes = figure.subplots()
            if _draw(axes, panel, rows, evaluations):
                axes.set_xlabel("optimizer step")
                drawn.append((panel, svg(figure, panel.title)))
    return drawn


def save_curves(path: Path, rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> None:
    """Draw the main curves as one picture on white, for a README or a slide; none where there are none."""
    with rc_context(STYLE):
        shown = [panel for panel in CURVES if _draw(Figure().subplots(), panel, rows, evaluations)][:6]
        if not shown:
            return
        num_columns = min(3, len(shown))
        num_rows = -(-len(shown) // num_columns)
        figure = Figure(
            figsize=(4.3 * num_columns, 3.1 * num_rows), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08)
        )
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes, panel in zip(grid.flat, shown, strict=False):
            _draw(axes, panel, rows, evaluations)
            axes.set_title(panel.title, pad=36)  # above two rows of legend
            axes.set_xlabel("optimizer step")
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        figure.savefig(path, dpi=160, facecolor="white")


def _draw(axes: Axes, panel: Panel, rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> bool:
    if panel.draw is not None:
        shown = panel.draw(axes, rows)
    else:
        shown = any([_draw_line(axes, line, rows, evaluations, panel.scale) for line in panel.lines])
    if not shown:
        return False
    if panel.scale == "share":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02), min(high, 1.02))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    elif panel.scale == "log":
        axes.set_yscale("log")
        low, high = axes.dataLim.intervaly
        axes.set_ylim(10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high * 1.001)))
        axes.minorticks_off()
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3 if len(labels) > 4 else 2,
        columnspacing=1.2, borderaxespad=0.1, handletextpad=0.5, labelspacing=0.2,
    )  # fmt: skip
    return True


def _draw_line(
    axes: Axes, line: Line, rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow], scale: str
) -> bool:
    source = evaluations if line.held_out else rows
    points = [
        (row["step"], row[line.key])
        for row in source
        if row.get(line.key) is not None and (line.role is None or row.get("role") == line.role)
    ]
    if scale == "log":
        points = [(step, value) for step, value in points if value > 0]
    if not points:
        return False
    color = COLORS[line.color]
    if line.held_out:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=color, label=line.label, marker="o", markersize=4.2, linewidth=1.9)
    else:
        _curve(axes, points, line.label, color, faded=any(row.get(line.key) is not None for row in evaluations))
    return True


def _curve(axes: Axes, points: Sequence[tuple[float, float]], label: str, color: str, *, faded: bool = False) -> None:
    """Draw a noisy series: faint as it is, strong as a running mean; `faded` where a better measure is drawn
    over it.
    """
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    window = max(1, len(y) // 20)
    if window > 1:
        axes.plot(x, y, color=color, alpha=0.22, linewidth=1.0)
    weights = np.ones(window)
    smooth = np.convolve(y, weights, "same") / np.convolve(np.ones_like(y), weights, "same")
    axes.plot(x, smooth, color=color, alpha=0.55 if faded else 1.0, linewidth=1.3 if faded else 1.9, label=label)
    if len(y) == 1:
        axes.plot(x, y, color=color, marker="o", markersize=4)
