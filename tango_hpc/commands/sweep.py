"""`tango sweep`: a grid or a list of settings as one job array, every cell a run of its own.

A sweep file:

    config: ../quickstart.yaml        # relative to this file; a list: later files over earlier ones
    stages: [sft, train]
    dir: runs/sweeps/alpha            # relative to where the command is called
    overrides: [train.generator_steps=60]
    grid:                             # every combination; or `cells:`, a list of settings
      algorithm.alpha_start: [0.05, 0.1, 0.2]
      config: [grpo.yaml, rloo.yaml]  # a file of the cell, over all of the above, relative to this file
    seeds: [0, 1, 2]
    throttle: 6                       # cells that run at once
    metric: generator.accuracy_after  # of summary.json; `goal: min` where less is better

A cell is known by its settings: the folder of its run is named after them, its seed and a short hash of them, whatever
place it has in the file. So a seed or a value can be added later, and what is there already is taken over.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tango_hpc.base.config import Config, config_to_yaml
from tango_hpc.base.config.load import Layers, explain_mistake, read_yaml
from tango_hpc.base.config.values import Count, FilePath, Positive, Section
from tango_hpc.base.errors import UserError
from tango_hpc.base.formats import label_of
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.status import RunState, states
from tango_hpc.runner.continuity import ConfigChange
from tango_hpc.runner.enter import changes_of_run, is_done
from tango_hpc.stages.stage import STAGES, Stage, stage_named

Value = bool | int | float | str | None

# Of the settings that one run may change when it is resumed, those whose change makes its result another one.
LENGTHS = re.compile(r"train\.generator_steps|sft\.\w+\.steps")
_MARKED = re.compile(r"_([0-9a-f]{8}_seed=\d+)$")


def _is_stage(name: str) -> str:
    try:
        return stage_named(name).name
    except UserError as error:
        raise ValueError(str(error)) from None


StageName = Annotated[str, AfterValidator(_is_stage)]


class SweepSettings(Section):
    """The sweep file."""

    config: Path | Annotated[list[Path], Field(min_length=1)]
    dir: FilePath
    stages: list[StageName] = Field(["train"], min_length=1, description="What each cell runs, one after the other.")
    overrides: list[str] = Field(default_factory=list, description="For every cell.")
    grid: dict[str, Annotated[list[Value], Field(min_length=1)]] = Field(
        default_factory=dict, description="Every combination of these."
    )
    cells: list[dict[str, Value]] = Field(default_factory=list, description="Exactly these, in place of a grid.")
    seeds: list[Count] = Field(default_factory=lambda: [0], min_length=1)
    throttle: Positive = Field(8, description="Cells that run at once.")
    metric: str = Field("generator.accuracy_after", description="What decides, by its name in summary.json.")
    goal: Literal["max", "min"] = "max"

    @field_validator("grid", "cells")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        for settings in [value] if isinstance(value, dict) else value:
            if "seed" in settings or "run.dir" in settings:
                raise ValueError("seed and run.dir are set for every cell; give seeds under `seeds`")
        return value


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    index: int  # place in the file
    settings: dict[str, Value]  # what sets it apart, without the seed; a config file by its name, wherever it lies
    seed: int
    config: Config

    @cached_property
    def directory(self) -> RunDirectory:
        """Its run directory."""
        return RunDirectory(self.config.run.dir)

    @property
    def exists(self) -> bool:
        """Return whether its run has been made."""
        return self.directory.config.is_file()

    @property
    def label(self) -> str:
        """Its settings in one line, by the last word of each key."""
        return label_of(self.settings)

    @property
    def name(self) -> str:
        """The cell's name in messages."""
        return f"{self.label}, seed {self.seed}"

    def changes(self) -> list[ConfigChange]:
        """Return the settings with which a run that is there would have had another result than the file asks
        for now.
        """
        resolved = config_to_yaml(self.config)
        if self.directory.config.read_text(encoding="utf-8") == resolved:
            return []
        found = changes_of_run(self.directory, resolved)
        return [change for change in found if not change.allowed or LENGTHS.fullmatch(change.key)]


@dataclass(frozen=True)
class Sweep:
    """A sweep file and its cells."""

    file: Path
    settings: SweepSettings
    cells: list[Cell]

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages that each cell runs."""
        return [STAGES[name] for name in self.settings.stages]

    def strangers(self) -> list[Path]:
        """Return the runs in the sweep's folder that the sweep's file no longer names."""
        known = {cell.directory.path for cell in self.cells}
        return [folder for folder in _folders(self.settings.dir) if folder not in known]


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
    combinations = settings.cells or [
        dict(zip(settings.grid, values, strict=True)) for values in itertools.product(*settings.grid.values())
    ]
    files = settings.config if isinstance(settings.config, list) else [settings.config]
    shared = Layers().over(*(file.parent / name for name in files), *settings.overrides)
    layers: dict[Value, Layers] = {None: shared}
    there = _folders_by_mark(settings.dir)
    cells: list[Cell] = []
    mistakes: list[str] = []
    for index, (chosen, seed) in enumerate(itertools.product(combinations, settings.seeds)):
        own = chosen.get("config")
        named = {key: Path(str(value)).stem if key == "config" else value for key, value in chosen.items()}
        values = [f"{key}={_as_yaml(value)}" for key, value in chosen.items() if key != "config"]
        folder = _find_folder(settings.dir, named, seed, there)
        try:
            if own not in layers:
                layers[own] = shared.over(file.parent / str(own))
            given = [*values, f"seed={seed}", f"run.dir={_as_yaml(str(folder))}"]
            config = layers[own].over(*given).check(f"cell {index} ({label_of(named)}, seed {seed})")
            cells.append(Cell(index, named, seed, config))
        except UserError as error:
            mistakes.append(str(error))
    counts = Counter(cell_mark(cell.settings, cell.seed) for cell in cells)
    twice = {cell.name: counts[cell_mark(cell.settings, cell.seed)] for cell in cells}
    mistakes += [f"{name}: stands {count} times" for name, count in twice.items() if count > 1]
    if mistakes:
        raise UserError(f"the sweep {file} has cells that cannot run:\n" + "\n".join(mistakes))
    return Sweep(file, settings, cells)


def cell_mark(settings: dict[str, Value], seed: int) -> str:
    """Return the end of the name of a cell's folder, by which it is found: a hash of its settings in any order, and its
    seed.
    """
    exact = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in settings.items()
    }
    return f"{hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:8]}_seed={seed}"


def _find_folder(sweep_dir: Path, settings: dict[str, Value], seed: int, there: dict[str, Path]) -> Path:
    """Return where the run of a cell lies or will lie."""
    mark = cell_mark(settings, seed)
    slug = re.sub(r"[^\w.=+-]+", "_", label_of(settings))[:80]
    return there.get(mark, sweep_dir / "cells" / f"{slug}_{mark}")


def _folders(sweep_dir: Path) -> list[Path]:
    return sorted(file.parent for file in (sweep_dir / "cells").glob("*/config.yaml"))


def _folders_by_mark(sweep_dir: Path) -> dict[str, Path]:
    """Return the runs that are there by the mark in their name."""
    return {match.group(1): folder for folder in _folders(sweep_dir) if (match := _MARKED.search(folder.name))}


def list_cells(sweep: Sweep, console: Console) -> None:
    """Print the cells, what became of those that are there, and how the others will run."""
    known = known_states(sweep)
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for title in ("settings", "seed", "state", "run directory"):
        table.add_column(title, overflow="fold")
    for cell in sweep.cells:
        state = known[cell.index].state if cell.index in known else "new"
        table.add_row(*map(Text, (cell.label, str(cell.seed), state, str(cell.config.run.dir))))
    console.print(table)
    launch = sweep.cells[0].config.launch
    console.print(
        f"{len(sweep.cells)} cells of {launch.nodes} x {launch.tasks_per_node} ranks, "
        f"{min(sweep.settings.throttle, len(sweep.cells))} at once",
        highlight=False,
    )


def check_unchanged(sweep: Sweep, cells: Iterable[Cell]) -> None:
    """Raise UserError where `cells` that are there ran with other settings than the file has now: no table compares
    them.
    """
    changed: dict[str, int] = Counter(str(change) for cell in cells if cell.exists for change in cell.changes())
    if changed:
        lines = [f"  {change} ({count} cells)" for change, count in changed.items()]
        raise UserError(
            f"cells in {sweep.settings.dir} were started with other settings than {sweep.file} asks for now:\n"
            + "\n".join([*lines[:10], *([f"  and {len(lines) - 10} more"] if len(lines) > 10 else [])])
            + "\nGive these their old values, or name another `dir` for cells with the new ones"
        )


def cell_states(cells: Iterable[Cell]) -> list[RunState]:
    """Return the state of each cell; the run of every cell must exist."""
    return states([cell.directory for cell in cells])


def known_states(sweep: Sweep) -> dict[int, RunState]:
    """Return the state of each cell whose run exists, by the cell's index. A cell is done after all stages of the
    sweep.
    """
    there = [cell for cell in sweep.cells if cell.exists]
    found = {}
    for cell, state in zip(there, cell_states(there), strict=True):
        if state.state == "done":
            left = [stage for stage in sweep.settings.stages if not is_done(cell.directory, stage)]
            if left:
                state = replace(state, state="stopped", detail=f"{', '.join(left)} has not run")
        found[cell.index] = state
    return found


def _as_yaml(value: Value) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
