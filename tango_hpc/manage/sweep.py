"""`tango sweep`: a grid or a list of settings as one job array, every cell a run of its own.

A sweep file:

    config: ../quickstart.yaml        # relative to this file
    stages: [sft, train]
    dir: runs/sweeps/alpha            # relative to where the command is called
    overrides: [train.generator_steps=60]
    grid:                             # every combination; or `cells:`, a list of settings
      algorithm.alpha_start: [0.05, 0.1, 0.2]
      algorithm.name: [grpo, rloo]
    seeds: [0, 1, 2]
    throttle: 6                       # cells that run at once
    metric: generator.accuracy_after  # of summary.json; `goal: min` where less is better
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tango_hpc.config import Config
from tango_hpc.config.load import apply_override, explain_mistake, read_tree, read_yaml, validate_tree
from tango_hpc.config.values import Count, Positive, Section
from tango_hpc.errors import StoppedEarly, UserError
from tango_hpc.launch.attempts import remember_job
from tango_hpc.launch.enter import prepare_run
from tango_hpc.launch.job import run_job, run_stages, say
from tango_hpc.launch.snapshot import take_snapshot
from tango_hpc.manage.profiles import load_profile
from tango_hpc.manage.resources import asked_of_a_node, node_memory
from tango_hpc.manage.status import RunState, states
from tango_hpc.manage.submit import (
    Cluster,
    check_cluster,
    check_log_folder,
    check_time,
    executor,
    job_environment,
    refused_by_slurm,
    sbatch_options,
)
from tango_hpc.report.formats import label_of
from tango_hpc.run.directory import RunDirectory

Value = bool | int | float | str | None


class SweepSettings(Section):
    """The sweep file."""

    config: Path
    dir: Path
    stages: list[Literal["sft", "train", "eval", "teacher"]] = Field(
        ["train"], min_length=1, description="What each cell runs, one after the other."
    )
    overrides: list[str] = Field(default_factory=list, description="For every cell.")
    grid: dict[str, Annotated[list[Value], Field(min_length=1)]] = Field(
        default_factory=dict, description="Every combination of these."
    )
    cells: list[dict[str, Value]] = Field(default_factory=list, description="Exactly these, in place of a grid.")
    seeds: list[Count] = Field(default_factory=lambda: [0], min_length=1)
    throttle: Positive = Field(8, description="Cells that run at once.")
    metric: str = Field("generator.accuracy_after", description="What decides, by its name in summary.json.")
    goal: Literal["max", "min"] = "max"


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    index: int
    settings: dict[str, Value]  # what sets it apart, without the seed
    seed: int
    config: Config

    @property
    def directory(self) -> RunDirectory:
        """Its run directory."""
        return RunDirectory(self.config.run.dir)

    @property
    def label(self) -> str:
        """Its settings in one line, by the last word of each key."""
        return label_of(self.settings)


@dataclass(frozen=True)
class Sweep:
    """A sweep file and its cells."""

    settings: SweepSettings
    cells: list[Cell]


def load_sweep(file: Path) -> Sweep:
    """Read the sweep file and check the configuration of every cell; all mistakes are reported at once."""
    tree = read_yaml(file)
    try:
        settings = SweepSettings.model_validate(tree)
    except ValidationError as error:
        lines = "\n".join(f"  - {explain_mistake(item, SweepSettings)}" for item in error.errors())
        raise UserError(f"the sweep {file} has mistakes:\n{lines}") from None
    if bool(settings.grid) == bool(settings.cells):
        raise UserError(f"the sweep {file} needs either `grid` or `cells`")
    config_file = file.parent / settings.config
    combinations = settings.cells or [
        dict(zip(settings.grid, values, strict=True)) for values in itertools.product(*settings.grid.values())
    ]
    cells: list[Cell] = []
    mistakes: list[str] = []
    for index, (chosen, seed) in enumerate(itertools.product(combinations, settings.seeds)):
        tree = read_tree(config_file)
        folder = settings.dir / "cells" / f"{index:03d}_{_file_name(label_of(chosen))}_seed={seed}"
        overrides = [*settings.overrides, *(f"{key}={_as_yaml(value)}" for key, value in chosen.items())]
        try:
            for override in [*overrides, f"seed={seed}", f"run.dir={_as_yaml(str(folder))}"]:
                apply_override(tree, override)
            cells.append(
                Cell(index, chosen, seed, validate_tree(tree, f"cell {index} ({label_of(chosen)}, seed {seed})"))
            )
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError(f"the sweep {file} has cells that cannot run:\n" + "\n".join(mistakes))
    return Sweep(settings, cells)


def list_cells(sweep: Sweep, console: Console) -> None:
    """Print the cells and how they will run."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for title in ("cell", "settings", "seed", "run directory"):
        table.add_column(title, overflow="fold")
    for cell in sweep.cells:
        table.add_row(*map(Text, (str(cell.index), cell.label, str(cell.seed), str(cell.config.run.dir))))
    console.print(table)
    launch = sweep.cells[0].config.launch
    console.print(
        f"{len(sweep.cells)} cells of {launch.nodes} x {launch.tasks_per_node} ranks, "
        f"{min(sweep.settings.throttle, len(sweep.cells))} at once",
        highlight=False,
    )


def submit_sweep(sweep: Sweep, console: Console, *, profile: str | None, cluster: Cluster, resubmit: bool) -> int:
    """Submit the cells as one array; on "local" and "debug" run them here in turn. Returns the exit code.

    Without `resubmit` no cell may have been started. With it, cells that are done, wait or run are left alone.
    Raises UserError for what cannot be submitted.
    """
    chosen_profile = load_profile(profile)
    check_cluster(cluster)
    check_log_folder(sweep.settings.dir)
    cells = _to_run(sweep, resubmit=resubmit)
    if not cells:
        console.print("Every cell is done, waiting or running.")
        return 0
    memory = node_memory([cell.config for cell in cells], sweep.settings.stages, chosen_profile)
    if len({json.dumps(sbatch_options(cell.config, chosen_profile, memory)) for cell in cells}) > 1:
        raise UserError(
            "the cells of a sweep are one job array and must ask Slurm for the same: launch.nodes, "
            "launch.tasks_per_node, launch.threads_per_rank, launch.device and launch.grace_seconds cannot vary"
        )
    check_time(cells[0].config, chosen_profile)
    for cell in cells:
        directory = prepare_run(sweep.settings.stages, cell.config, resume=cell.directory.config.is_file())
        directory.stop_file.unlink(missing_ok=True)
    if cluster != "slurm":
        return _run_here(sweep, cells, console)
    stages = ",".join(sweep.settings.stages)
    home = sweep.settings.dir.absolute()
    # Cells of an earlier submission may still wait or run: they keep the code that they were submitted with.
    number = len(list(home.glob("snapshot_*"))) + 1
    snapshot = take_snapshot(home / f"snapshot_{number}")
    made = executor(cells[0].config, chosen_profile, memory, home / "logs", f"sweep-{home.name}", cluster, snapshot)
    made.update_parameters(array_parallelism=sweep.settings.throttle)
    asked = asked_of_a_node(cells[0].config, chosen_profile, memory)
    with job_environment(chosen_profile, snapshot, cluster), refused_by_slurm(asked):
        jobs = made.map_array(run_job, [str(cell.directory.path) for cell in cells], [stages] * len(cells))
    for cell, job in zip(cells, jobs, strict=True):
        remember_job(cell.directory, stages, cluster, job, profile)
    console.print(
        f"Submitted {len(cells)} cells as job array {jobs[0].job_id.partition('_')[0]}. "
        f"Watch them with: tango status {shlex.quote(str(sweep.settings.dir))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _run_here(sweep: Sweep, cells: list[Cell], console: Console) -> int:
    """Run the cells one after the other, also after one that failed; a stop ends it. The exit code is the worst."""
    failed = []
    for cell in cells:
        say(console, f"cell {cell.index}: {cell.label}, seed {cell.seed}")
        code = run_stages(cell.directory, ",".join(sweep.settings.stages), console)
        if code == StoppedEarly.exit_code:
            return code
        if code != 0:
            failed.append(str(cell.index))
    if failed:
        say(console, f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}")
    return 1 if failed else 0


def _to_run(sweep: Sweep, *, resubmit: bool) -> list[Cell]:
    started = [cell for cell in sweep.cells if cell.directory.config.is_file()]
    if not resubmit:
        if started:
            raise UserError(
                f"{sweep.settings.dir} already holds {len(started)} of {len(sweep.cells)} cells; "
                "use --resubmit for those that are not done, --results for those that are, or another `dir`"
            )
        return sweep.cells
    known = dict(zip([cell.index for cell in started], cell_states(started), strict=True))
    unknown = [state for state in known.values() if state.state == "unknown"]
    if unknown:
        raise UserError(
            f"whether {len(unknown)} of {len(sweep.cells)} cells wait or run is not known, so nothing was submitted; "
            f"try again later. {unknown[0].run}: {unknown[0].detail}"
        )
    return [
        cell
        for cell in sweep.cells
        if cell.index not in known or known[cell.index].state not in ("done", "waiting", "running")
    ]


def cell_states(cells: list[Cell]) -> list[RunState]:
    """What became of each cell."""
    return states([cell.directory for cell in cells])


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text)[:80]


def _as_yaml(value: Value) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
