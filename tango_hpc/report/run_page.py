"""report.html: one self-contained page about a run, complete, in progress, stopped or crashed.

Everything is read from the run directory; nothing is fetched when the page is opened.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tango_hpc.base.config.load import read_protocol
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import json_object, write_atomically
from tango_hpc.base.formats import clock
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import dumped_steps, read_rollouts
from tango_hpc.base.run.metrics import MetricsRow, read_evaluations, read_events, read_metrics
from tango_hpc.base.run.progress import read_progress
from tango_hpc.base.run.summary import BEFORE_AFTER, code_that_ran, read_provenance, read_summary
from tango_hpc.report.html import render
from tango_hpc.report.plots import drawings, save_curves
from tango_hpc.report.reading import choose_examples, facts, read_solution_of, step_views
from tango_hpc.runner.outcome import read_failures

EXAMPLES_PER_ROLE = 6


@dataclass(frozen=True)
class ShownStage:
    """A stage as the page shows it."""

    title: str
    unit: str = ""  # of its results; "" for a stage of optimizer steps
    is_per_role: bool = False  # each role has data of its own


TRAINING = "train"  # its curves come first
SHOWN = {
    TRAINING: ShownStage("Reinforcement learning"),
    "sft": ShownStage("Supervised fine-tuning", is_per_role=True),
    "eval": ShownStage("Evaluation", unit="sets of questions"),
    "teacher": ShownStage("Teacher", unit="chunks of questions"),
}


def write_report(directory: RunDirectory) -> None:
    """Write report.html and, where there are curves, report_curves.png of the last stage that has any."""
    rows, evaluations = read_metrics(directory), read_evaluations(directory)
    summary = read_summary(directory)
    stages = list(dict.fromkeys(row["stage"] for row in [*rows, *evaluations]))
    stages.sort(key=lambda stage: stage != TRAINING)
    measured = {
        stage: ([row for row in rows if row["stage"] == stage], [row for row in evaluations if row["stage"] == stage])
        for stage in stages
    }
    rollouts, unreadable = _rollouts(directory)
    results = directory.path / "eval/results.md"
    page = render(
        "run.html",
        title=directory.path.name,
        path=directory.path,
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        status=summary.get("status", "not started"),
        state=list(_state(directory, summary, len(rows))),
        tiles=list(_tiles(summary, rows, evaluations)),
        failures=read_failures(directory),
        left_out=[(stage, last) for stage, last in _left_out(rows) if last["data/too_long"]],
        events=read_events(directory),
        nonfinite=[row for row in rows if row.get("nonfinite")],
        stages=[(_shown(stage).title, drawings(*measured[stage])) for stage in stages],
        expected=json_object(directory.expected.read_bytes()) if directory.expected.is_file() else None,
        benchmarks=results.read_text(encoding="utf-8") if results.is_file() else None,
        has_steps=bool(rows) or all(not _shown(name).unit for name in summary.get("stages", {})),
        rollouts=rollouts,
        unreadable=unreadable,
        evaluations=evaluations,
        evaluation_keys=dict.fromkeys(
            key for row in evaluations for key in row if key not in ("stage", "step", "nonfinite")
        ),
        attempts=[entry | {"code": code_that_ran(entry)} for entry in read_provenance(directory)["attempts"]],
        config=directory.config.read_text(encoding="utf-8", errors="replace") if directory.config.is_file() else None,
    )
    write_atomically(directory.report, page)
    if stages:
        save_curves(directory.report_curves, *measured[stages[0]])


def _shown(stage: str) -> ShownStage:
    return SHOWN.get(stage, ShownStage(stage))


def _state(directory: RunDirectory, summary: dict[str, Any], num_steps: int) -> Iterator[str]:
    parts = {name: stage for name, stage in summary.get("stages", {}).items() if _shown(name).unit}
    if num_steps or not parts:
        yield f"{num_steps} optimizer steps"
    for name, stage in parts.items():
        yield f"{name}: {_shown(name).unit} done: {stage.get('steps', 0)}"
    if summary.get("wall_seconds"):
        yield f"{clock(summary['wall_seconds'])} of work"
    progress = read_progress(directory)
    if summary.get("status") == "running" and progress:
        ago = clock(max(0.0, time.time() - directory.progress.stat().st_mtime))
        where = f"{progress['stage']} {progress['step']}/{progress['total_steps']}, {progress['phase']}"
        yield f"{where}, last sign of life {ago} ago"


def _left_out(rows: Sequence[MetricsRow]) -> list[tuple[str, MetricsRow]]:
    """Return for each training data set a row that counts what is too long to use."""
    last: dict[str, MetricsRow] = {}
    for row in rows:
        if row.get("data/too_long") is not None and row.get("data/rows") is not None:
            shown = _shown(row["stage"])
            last[f"{shown.title} of the {row['role']}" if shown.is_per_role else shown.title] = row
    return list(last.items())


def _tiles(
    summary: dict[str, Any], rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]
) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers on top: name, value, what it is to be compared with."""
    is_done = summary.get("stages", {}).get(TRAINING, {}).get("status") == "done"
    for name, title in BEFORE_AFTER:
        section, _, key = name.partition(".")
        before = summary.get(section, {}).get(f"{key}_before")
        after = summary.get(section, {}).get(f"{key}_after")
        so_far = [row for row in evaluations if row.get(f"{section}/{key}") is not None]
        when = "after training"
        if (after is None or not is_done) and so_far:
            after, when = so_far[-1][f"{section}/{key}"], f"after step {so_far[-1]['step']}"
        if after is None:
            continue
        gain = "" if before is None else f", from {100 * before:.1f}%: {100 * (after - before):+.1f} points"
        yield title, f"{100 * after:.1f}%", when + gain
    if summary.get("tokens_per_second"):
        yield "throughput", f"{summary['tokens_per_second']:,.0f}", "tokens per second"
    trained = [row for row in rows if row["stage"] == TRAINING]
    if shares := [row["speed/mfu"] for row in trained if row.get("speed/mfu") is not None]:
        a_rank = [rate for row in trained if (rate := row.get("speed/tokens_per_second_per_rank")) is not None]
        rate = f"; a rank generates {statistics.median(a_rank):,.0f} tokens a second" if a_rank else ""
        yield "MFU", f"{100 * statistics.median(shares):.0f}%", f"of the peak in updates, median{rate}"
    peaks = {
        role: max((row.get(f"memory/{role}_peak_bytes") or 0 for row in rows), default=0)
        for role in ("generator", "verifier")
    }
    if any(peaks.values()):
        each = " and ".join(f"{peak / 2**30:.1f}" for peak in peaks.values() if peak)
        yield "memory", f"{each} GiB", f"at most in a process of {' and '.join(role for role in peaks if peaks[role])}"
    sent = [row["reshard/bytes_sent"] for row in rows if row.get("reshard/bytes_sent") is not None]
    if any(sent):
        least = [row["reshard/bytes_minimum"] for row in rows if row.get("reshard/bytes_minimum") is not None]
        lower_bound = f"MB a step sent, minimum {sum(least) / len(least) / 1e6:,.1f}" if least else "MB a step sent"
        yield "weight sync", f"{sum(sent) / len(sent) / 1e6:,.1f}", lower_bound


def _rollouts(directory: RunDirectory) -> tuple[list[tuple[str, int, int, list[Any]]], list[str]]:
    """Return a few judged responses of each role at its last dumped step (role, step, number of responses, examples),
    and what was passed over because it cannot be read.
    """
    shown, unreadable = [], []
    try:
        protocol = read_protocol(directory.config)
    except UserError as error:
        return [], [str(error)]
    for role, steps in sorted(dumped_steps(directory.rollouts).items()):
        for step in reversed(steps):
            try:
                rows = read_rollouts(directory.rollout_file(role, step))
            except UserError as error:
                unreadable.append(str(error))
                continue
            chosen = [(row, read_solution_of(row, protocol)) for row in choose_examples(rows, EXAMPLES_PER_ROLE)]
            examples = [(row, step_views(row, solution), facts(row, solution)) for row, solution in chosen]
            shown.append((role, step, len(rows), examples))
            break
    return shown, unreadable
