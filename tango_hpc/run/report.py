"""report.html: one self-contained page about a run, complete, in progress, stopped or crashed.

Everything is read from the run directory; nothing is fetched when the page is opened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from tango_hpc.files import write_atomically
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.dumps import RolloutRow, dumped_steps, read_rollouts
from tango_hpc.run.metrics import MetricsRow, read_evaluations, read_metrics
from tango_hpc.run.plots import PANELS, panel_svg, save_curves
from tango_hpc.run.progress import clock
from tango_hpc.run.provenance import read_provenance
from tango_hpc.run.reading import JUDGEMENT_NAMES, choose_examples, facts, step_views
from tango_hpc.run.summary import BEFORE_AFTER, read_summary

EXAMPLES_PER_ROLE = 6
BADGES = {True: "badge right", False: "badge wrong", None: ""}
STAGE_TITLES = {"train": "Reinforcement learning", "sft": "Supervised fine-tuning"}


def write_report(directory: RunDirectory) -> None:
    """Writes report.html and, where there are curves, report_curves.png of the last stage that has any."""
    rows, evaluations = read_metrics(directory), read_evaluations(directory)
    stages = list(dict.fromkeys(row.get("stage") for row in [*rows, *evaluations]))
    stages.sort(key=lambda stage: stage != "train")  # what the run is about comes first, the rest in order
    body = [_header(directory, rows), _tiles(read_summary(directory), rows, evaluations), _problems(directory, rows)]
    for stage in stages:
        body.append(_charts(str(stage), _of(rows, stage), _of(evaluations, stage)))
    if not stages:
        body.append("<p>No optimizer step has been written yet.</p>")
    body += [_examples(directory), _evaluation_table(evaluations), _about(directory)]
    style = resources.files("tango_hpc.run").joinpath("report.css").read_text(encoding="utf-8")
    title = escape(directory.path.name)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )
    write_atomically(directory.report, page)
    if stages:
        save_curves(directory.report_curves, _of(rows, stages[0]), _of(evaluations, stages[0]))


def _of(rows: Sequence[MetricsRow], stage: str | None) -> list[MetricsRow]:
    return [row for row in rows if row.get("stage") == stage]


def _header(directory: RunDirectory, rows: Sequence[MetricsRow]) -> str:
    summary = read_summary(directory)
    status = summary.get("status", "not started")
    parts = [f"{len(rows)} optimizer steps"]
    if summary.get("wall_seconds"):
        parts.append(f"{clock(summary['wall_seconds'])} of work")
    if status == "running" and directory.progress.is_file():
        state = json.loads(directory.progress.read_text(encoding="utf-8"))
        ago = clock(max(0.0, time.time() - directory.progress.stat().st_mtime))
        parts.append(
            f"{state['stage']} {state['step']}/{state['total_steps']}, {state['phase']}, last sign of life {ago} ago"
        )
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        f'<h1>{escape(directory.path.name)}</h1><p><span class="badge {escape(status)}">{escape(status)}</span> '
        f'{escape(" · ".join(parts))}</p><p class="muted">{escape(str(directory.path))} · written {written}</p>'
    )


def _tiles(summary: dict[str, Any], rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> str:
    tiles = []
    for name, title in BEFORE_AFTER:
        section, _, key = name.partition(".")
        before = summary.get(section, {}).get(f"{key}_before")
        after = summary.get(section, {}).get(f"{key}_after")
        so_far = [
            (row["step"], row[f"{section}/{key}"]) for row in evaluations if row.get(f"{section}/{key}") is not None
        ]
        when = "after training"
        if after is None and so_far:
            step, after = so_far[-1]
            when = f"after step {step}"
        if after is None:
            continue
        gain = "" if before is None else f", from {100 * before:.1f}%: {100 * (after - before):+.1f} points"
        tiles.append((title, f"{100 * after:.1f}%", when + gain))
    if summary.get("tokens_per_second"):
        tiles.append(("throughput", f"{summary['tokens_per_second']:,.0f}", "tokens per second"))
    sent = [row["reshard/bytes_sent"] for row in rows if row.get("reshard/bytes_sent") is not None]
    if sent and any(sent):
        least = [row["reshard/bytes_minimum"] for row in rows if row.get("reshard/bytes_minimum") is not None]
        lower_bound = f"MB a step sent, minimum {sum(least) / len(least) / 1e6:,.1f}" if least else "MB a step sent"
        tiles.append(("weight sync", f"{sum(sent) / len(sent) / 1e6:,.1f}", lower_bound))
    cells = "".join(
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="from">{escape(note)}</div></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _problems(directory: RunDirectory, rows: Sequence[MetricsRow]) -> str:
    """What went wrong: failure files of ranks, and steps whose numbers were not finite."""
    notes = []
    for path in sorted(directory.failures.glob("*")) if directory.failures.is_dir() else []:
        text = path.read_text(encoding="utf-8", errors="replace").replace("\\n", "\n")
        notes.append(f"<details><summary>failure of {escape(path.stem)}</summary><pre>{escape(text)}</pre></details>")
    bad = [(row["step"], row["nonfinite"]) for row in rows if row.get("nonfinite")]
    if bad:
        shown = "; ".join(f"step {step}: {', '.join(keys)}" for step, keys in bad[:8])
        more = f" and {len(bad) - 8} more steps" if len(bad) > 8 else ""
        notes.append(f"<p>Values that were not finite: {escape(shown + more)}.</p>")
    return f'<div class="box">{"".join(notes)}</div>' if notes else ""


def _charts(stage: str, rows: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> str:
    figures = []
    for panel in PANELS:
        svg = panel_svg(panel, rows, evaluations)
        if svg is not None:
            figures.append(
                f"<figure><figcaption><h3>{escape(panel.title)}</h3><p>{escape(panel.caption)}</p></figcaption>{svg}</figure>"
            )
    title = STAGE_TITLES.get(stage, stage)
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(figures)}</div>'


def _examples(directory: RunDirectory) -> str:
    sections = []
    for role, steps in sorted(dumped_steps(directory.rollouts).items()):
        rows = read_rollouts(directory.rollout_file(role, steps[-1]))
        shown = "".join(map(_rollout, choose_examples(rows, EXAMPLES_PER_ROLE)))
        what = "Solutions of the generator" if role == "generator" else "Verifications"
        sections.append(
            f'<h2>{what}, step {steps[-1]}</h2><p class="muted">A few of {len(rows)}; green steps were judged right, '
            f"red ones wrong. All of them: <code>tango rollouts RUN --role {role} --step {steps[-1]}</code></p>{shown}"
        )
    return "".join(sections)


def _rollout(row: RolloutRow) -> str:
    items = []
    for view in step_views(row):
        kind = {1: "right", -1: "wrong"}.get(view.judgement or 0, "")
        numbers = []
        if view.judgement is not None:
            numbers.append(JUDGEMENT_NAMES[view.judgement])
        if view.reward is not None:
            numbers.append(f"reward {view.reward:+.2f}")
        if view.advantage is not None:
            numbers.append(f"advantage {view.advantage:+.2f}")
        items.append(
            f'<li class="{kind}"><span class="text">{escape(view.text)}</span>'
            f'<span class="numbers">{" · ".join(numbers)}</span></li>'
        )
    known = "".join(
        f'<span>{escape(name)} <b class="{BADGES[good]}">{escape(value)}</b></span>' for name, value, good in facts(row)
    )
    texts = [("response", row.response_text)]
    if row.verification_text:
        texts.append(("verification", row.verification_text))
    if row.role == "verifier" and row.solution_text:
        texts.append(("solution that was judged", row.solution_text))
    raw = "".join(f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>" for name, text in texts)
    return (
        f'<div class="rollout"><div class="question">{escape(row.question)}</div><ol class="steps">{"".join(items)}</ol>'
        f'<div class="facts">{known}</div>{raw}</div>'
    )


def _evaluation_table(evaluations: Sequence[MetricsRow]) -> str:
    """All evaluations on held-out data, as numbers."""
    keys = list(dict.fromkeys(key for row in evaluations for key in row if key not in ("stage", "step", "nonfinite")))
    if not keys:
        return ""
    head = "".join(f'<th class="number">{escape(key)}</th>' for key in keys)
    body = "".join(
        f"<tr><td>{escape(str(row.get('stage')))}</td><td class='number'>{row['step']}</td>"
        + "".join(f'<td class="number">{_number(row.get(key))}</td>' for key in keys)
        + "</tr>"
        for row in evaluations
    )
    return (
        '<h2>Held-out evaluations</h2><div class="box scroll"><table><tr><th>stage</th><th class="number">step</th>'
        f"{head}</tr>{body}</table></div>"
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else escape("" if value is None else str(value))


def _about(directory: RunDirectory) -> str:
    """Configuration and provenance."""
    attempts = read_provenance(directory).get("attempts", [])
    rows = []
    for attempt in attempts:
        code = attempt["code"].get("copied_from", attempt["code"])
        commit = code.get("commit", "")[:12] + (" with changes" if code.get("changed") else "")
        job = attempt["environment"].get("SLURM_JOB_ID", "")
        cells = (attempt["attempt"], attempt["stage"], attempt["started"], attempt["host"], job, commit)
        command = " ".join(attempt["command"])
        changes = "; ".join(attempt["config_changes"])
        shown = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        rows.append(f"<tr>{shown}<td><code>{escape(command)}</code></td><td>{escape(changes)}</td></tr>")
    head = "".join(
        f"<th>{name}</th>" for name in ("", "stage", "started", "host", "job", "commit", "command", "changed settings")
    )
    parts = ["<h2>About this run</h2>"]
    if rows:
        parts.append(f'<div class="box scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>')
    if directory.config.is_file():
        config = escape(directory.config.read_text(encoding="utf-8"))
        parts.append(f'<div class="box"><details><summary>config.yaml</summary><pre>{config}</pre></details></div>')
    if attempts:
        last = attempts[-1]
        versions = "\n".join(f"{name} {version}" for name, version in last["versions"].items())
        diff = last["code"].get("copied_from", last["code"]).get("diff", "")
        extra = f"<details><summary>uncommitted changes</summary><pre>{escape(diff)}</pre></details>" if diff else ""
        parts.append(
            f'<div class="box"><details><summary>versions</summary><pre>{escape(versions)}</pre></details>{extra}</div>'
        )
    return "".join(parts)
