"""The seconds in `tango plan`: JSON and a table.

`time` of the JSON has `machine` (its name), `lengths` (by role: `prompt`, `response`, `longest`, `spread`), `steps` (by
role of the step: `count`, `seconds`, `phases`, of which each has `seconds`, `bound` and `parts`), `evaluation`,
`checkpoint` and `start` (`seconds` and `count`), `run_seconds`, `gpu_hours`, and with `--at` `limit_seconds` and `jobs`
(null where a job ends before its first step).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.commands.profiles import time_limit_minutes
from tango_hpc.plan.cards import Machine
from tango_hpc.plan.lengths import Load
from tango_hpc.plan.seconds import Cost, plan_time


def time_report(config: Config, machine: Machine, load: Load, limit: str | None) -> dict[str, Any]:
    """Return the seconds of a run as JSON-ready values. Raises UserError for a time limit that is none."""
    try:
        seconds = None if limit is None else 60 * time_limit_minutes(limit)
    except ValueError as error:
        raise UserError(f"--at {limit}: {error}") from None
    plan = plan_time(config, machine, load)
    report = {
        "machine": machine.name,
        "lengths": {role: asdict(lengths) for role, lengths in load.lengths.items()},
        "steps": {
            role: {
                "count": plan.num_steps[role],
                "seconds": plan.step_seconds(role),
                "phases": {name: _cost(cost) for name, cost in phases.items() if cost.seconds},
            }
            for role, phases in plan.steps.items()
        },
        "evaluation": {"count": plan.num_evaluations, "seconds": plan.evaluation.seconds},
        "checkpoint": {"count": plan.num_checkpoints, "seconds": plan.checkpoint.seconds},
        "start": {"count": 1, "seconds": plan.start},
        "run_seconds": plan.run_seconds,
        "gpu_hours": plan.rank_hours,
    }
    if seconds is not None:
        report |= {"limit_seconds": seconds, "jobs": plan.num_jobs(seconds, config.launch.grace_seconds)}
    return report


def _cost(cost: Cost) -> dict[str, Any]:
    return {"seconds": cost.seconds, "bound": cost.bound, "parts": dict(cost.parts)}


def show_time(time: dict[str, Any], console: Console) -> None:
    """Print the seconds of each phase, and of the run."""
    lengths = ", ".join(
        f"{role} {known['prompt']:,.0f} + {known['response']:,.0f}" for role, known in time["lengths"].items()
    )
    table = Table(title=f"Seconds of a step, {time['machine']}; mean tokens: {lengths}", title_justify="left")
    table.add_column("phase")
    for role in time["steps"]:
        table.add_column(f"{role} step", justify="right")
        table.add_column("bound by")
    for phase in dict.fromkeys(name for step in time["steps"].values() for name in step["phases"]):
        found = [step["phases"].get(phase) for step in time["steps"].values()]
        table.add_row(phase, *(cell for cost in found for cell in _cells(cost)))
    table.add_row(
        "step", *(cell for step in time["steps"].values() for cell in (f"{step['seconds']:,.1f}", "")), style="bold"
    )
    console.print(table)
    steps = " and ".join(f"{step['count']:,} {role} steps" for role, step in time["steps"].items())
    more = f", {time['evaluation']['count']} evaluations of {time['evaluation']['seconds']:,.0f} s"
    console.print(
        f"{steps}{more}: {_duration(time['run_seconds'])}, {time['gpu_hours']:,.1f} hours of all ranks together"
    )
    if "jobs" in time:
        jobs = time["jobs"]
        console.print(
            f"in jobs of {_duration(time['limit_seconds'])}: {jobs}"
            if jobs is not None
            else f"a job of {_duration(time['limit_seconds'])} ends before its first step is saved"
        )


def _cells(cost: dict[str, Any] | None) -> tuple[str, str]:
    return ("", "") if cost is None else (f"{cost['seconds']:,.1f}", cost["bound"])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02} h" if minutes >= 60 else f"{seconds:,.0f} s"
