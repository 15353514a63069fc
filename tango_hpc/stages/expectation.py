"""A run that compares itself: seconds of its first steps beside those that the plan predicts for its lengths.

RUN/expected.json: `machine`, and `phases`, each with `role` (of the step), `phase`, `predicted` and `measured`, in
seconds of a step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.files import write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import PHASES, TURNS, MetricsRow, read_metrics
from tango_hpc.plan.here import machine_here
from tango_hpc.plan.lengths import measured_load
from tango_hpc.plan.seconds import step_phases

AFTER_STEPS = 10
LEAST_SECONDS = 0.1  # of a phase that is shown
MUCH = 1.5


def compare_with_plan(config: Config, directory: RunDirectory) -> list[str]:
    """Write RUN/expected.json from the steps so far, and return what to say; nothing where this machine's rates are not
    known.
    """
    machine = machine_here(config)
    if machine is None:
        return []
    rows = read_metrics(directory, "train")
    load = measured_load(config, rows)
    found: list[dict[str, Any]] = []
    for role in config.roles:
        own = [row for row in rows if row["role"] == role][1:]  # the first warms up
        if own:
            costs = step_phases(config, machine, load, role)
            predicted = {phase: costs[phase].seconds if phase in costs else 0.0 for phase in (*PHASES, "score", *TURNS)}
            found += _compared(role, predicted, own)
    content = {"machine": machine.name, "phases": found}
    write_atomically(directory.expected, json.dumps(content, indent=2) + "\n")
    return list(_said(machine.name, found))


def _compared(role: str, predicted: Mapping[str, float], rows: Sequence[MetricsRow]) -> Iterator[dict[str, Any]]:
    for phase, seconds in predicted.items():
        measured = statistics.fmean(row.get(f"seconds/{phase}") or 0.0 for row in rows)
        if max(seconds, measured) >= LEAST_SECONDS:
            yield {"role": role, "phase": phase, "predicted": seconds, "measured": measured}


def _said(machine: str, found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for role in dict.fromkeys(one["role"] for one in found):
        own = [one for one in found if one["role"] == role]
        phases = ", ".join(f"{one['phase']} {one['predicted']:.1f} and {one['measured']:.1f}" for one in own)
        total = " and ".join(f"{sum(one[key] for one in own):.1f}" for key in ("predicted", "measured"))
        yield f"seconds of a {role} step on {machine}, predicted and measured: {total} ({phases})"
    far = [one for one in found if not 1 / MUCH <= (one["measured"] + 1e-9) / (one["predicted"] + 1e-9) <= MUCH]
    if far:
        named = ", ".join(f"{one['phase']} of a {one['role']} step" for one in far)
        yield f"more than half off the prediction: {named}"
