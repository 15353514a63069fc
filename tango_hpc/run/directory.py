"""The run directory: every file name of a run, and the rules for starting in a directory that exists.

RUN/
  config.yaml         the resolved configuration
  provenance.json     code, versions, host and command of every attempt
  metrics.jsonl       one object per optimizer step           (run/metrics.py)
  evaluations.jsonl   one object per evaluation in the loop   (run/metrics.py)
  tensorboard/        the same numbers, one folder per stage
  rollouts/           Parquet dumps of responses              (run/dumps.py)
  checkpoints/        everything needed to continue
  logs/               output of the ranks
  progress.json       what the run is doing now               (run/progress.py)
  summary.json        results                                 (run/summary.py)
  report.html         plots                                   (report/run_page.py)
  control/ failures/ heartbeat/ snapshot/                     (launch/)
"""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tango_hpc.errors import UserError
from tango_hpc.files import write_atomically
from tango_hpc.run.steps import StepName
from tango_hpc.run.summary import read_summary

# Settings that a resumed run may change: they decide where, how fast and how long it runs, not what it computes.
# A longer run also stretches the schedules of alpha and of the learning rate from the resumed step on.
CHANGEABLE_ON_RESUME = (
    "run.*",
    "launch.nodes",
    "launch.tasks_per_node",
    "launch.device",
    "launch.threads_per_rank",
    "launch.*_seconds",
    "launch.max_attempts_without_progress",
    "train.generator_steps",
    "train.eval_every",
    "train.dump_every",
    "train.max_logprob_gap",
    "sft.*.steps",
    "sft.*.eval_every",
    "checkpoint.*",
    "reshard.*",
    "rollout.*",
    "*.parallel.*",
    "*.micro_batch_tokens",
    "*.recompute_activations",
)

# What the launcher may have put into a directory before the run itself starts.
LAUNCHER_ENTRIES = frozenset({"logs", "control", "snapshot", "failures", "heartbeat", "launch"})


@dataclass(frozen=True)
class ConfigChange:
    """One setting that differs between two configurations; a missing one is None."""

    key: str
    before: Any
    after: Any

    @property
    def allowed(self) -> bool:
        """Whether a resumed run may make this change."""
        return any(fnmatch.fnmatchcase(self.key, pattern) for pattern in CHANGEABLE_ON_RESUME)

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


class RunDirectory:
    """Knows the path of every file of one run. Making one touches nothing; `create` and `open` do."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    # -- starting ------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], resolved_config_yaml: str, *, resume: bool, stage: str | None = None
    ) -> tuple[RunDirectory, list[ConfigChange]]:
        """Makes the run directory, or enters the one that is there; returns it with the changes of its settings.

        A new or empty directory is always taken. One that holds a run is taken
        - with `resume`, when the configurations differ in nothing but `CHANGEABLE_ON_RESUME`;
        - without it, when they are equal and `stage` has not been started there yet, so that the stages of one
          configuration (fine-tuning, then reinforcement learning) share a directory.
        Raises UserError otherwise, and where the directory cannot be written.
        """
        directory = cls(path)
        directory._make_folders()
        try:
            # "x" lets exactly one of two runs that start at once have the directory.
            with directory.config.open("x", encoding="utf-8") as file:
                file.write(resolved_config_yaml)
        except FileExistsError:
            changes = directory._enter(resolved_config_yaml, resume=resume, stage=stage)
            if changes:
                write_atomically(directory.config, resolved_config_yaml)
            return directory, changes
        except OSError as error:
            raise UserError(_cannot_write(directory.path, error)) from error
        return directory, []

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run directory at `path`; raises UserError where there is none."""
        directory = cls(path)
        if not directory.config.is_file():
            what = "has no config.yaml" if directory.path.is_dir() else "does not exist"
            raise UserError(f"{directory.path} is not a run directory: it {what}. Give the run.dir of a run.")
        return directory

    def _make_folders(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            strangers = sorted({entry.name for entry in self.path.iterdir()} - LAUNCHER_ENTRIES)
            if strangers and not self.config.is_file():
                raise UserError(
                    f"{self.path} is not empty and is not a run (it holds {', '.join(strangers[:5])}). "
                    "Choose another directory with run.dir=PATH."
                )
            folders = (self.tensorboard, self.rollouts, self.checkpoints, self.logs, self.control, self.failures)
            for folder in (*folders, self.heartbeats):
                folder.mkdir(exist_ok=True)
            descriptor, probe = tempfile.mkstemp(dir=self.path, prefix=".writable-")
            os.close(descriptor)
            os.unlink(probe)
        except OSError as error:
            raise UserError(_cannot_write(self.path, error)) from error

    def _enter(self, resolved_config_yaml: str, *, resume: bool, stage: str | None) -> list[ConfigChange]:
        changes = config_changes(self.config.read_text(encoding="utf-8"), resolved_config_yaml)
        if not resume:
            started = read_summary(self).get("stages", {})
            if not changes and stage is not None and stage not in started:
                return []
            difference = ""
            if changes:
                shown = "".join(f"\n  {change}" for change in changes)
                difference = f" Its configuration differs in:{shown}"
            raise UserError(
                f"{self.path} already holds a run. Continue it with --resume, or choose another directory with "
                f"run.dir=PATH.{difference}"
            )
        refused = [change for change in changes if not change.allowed]
        if refused:
            shown = "".join(f"\n  {change}" for change in refused)
            raise UserError(
                f"{self.path} cannot be resumed with these settings changed:{shown}\n"
                "Give them their old values, or start a new run with run.dir=PATH."
            )
        return changes

    # -- names ---------------------------------------------------------------------------------------------

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def provenance(self) -> Path:
        """What code ran where, for every attempt."""
        return self.path / "provenance.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object per evaluation in the loop, the one before training (step 0) included."""
        return self.path / "evaluations.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files, one folder per stage."""
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        """Parquet dumps of rollouts."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of everything that a run needs to continue."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of the ranks and of the supervisor."""
        return self.path / "logs"

    @property
    def progress(self) -> Path:
        """What the run is doing now."""
        return self.path / "progress.json"

    @property
    def summary(self) -> Path:
        """Results of the run."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The page with plots."""
        return self.path / "report.html"

    @property
    def report_curves(self) -> Path:
        """The report's main curves as one picture."""
        return self.path / "report_curves.png"

    @property
    def control(self) -> Path:
        """Requests to a running job."""
        return self.path / "control"

    @property
    def stop_file(self) -> Path:
        """While this file exists the run saves at its next safe point and ends."""
        return self.control / "stop"

    @property
    def failures(self) -> Path:
        """One file per rank that failed."""
        return self.path / "failures"

    @property
    def heartbeats(self) -> Path:
        """One file per rank, touched as it advances."""
        return self.path / "heartbeat"

    @property
    def snapshot(self) -> Path:
        """The code that a submitted job runs, copied at submission."""
        return self.path / "snapshot"

    def failure_file(self, rank: int) -> Path:
        """Why `rank` failed."""
        return self.failures / f"rank_{rank:05d}.json"

    def heartbeat_file(self, rank: int) -> Path:
        """When `rank` last advanced, and where it was."""
        return self.heartbeats / f"rank_{rank:05d}.json"

    def rank_log(self, rank: int) -> Path:
        """Output of `rank`."""
        return self.logs / f"rank_{rank:05d}.log"

    def rollout_file(self, role: str, step: int) -> Path:
        """Dump of the rollouts of `role` at optimizer step `step`."""
        return self.rollouts / f"{StepName(step, role=role)}.parquet"


def config_changes(before_yaml: str, after_yaml: str) -> list[ConfigChange]:
    """The settings in which two configurations differ, by dotted key."""
    before, after = _flatten(yaml.safe_load(before_yaml)), _flatten(yaml.safe_load(after_yaml))
    keys = sorted(before.keys() | after.keys())
    return [ConfigChange(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {
        key: value
        for name, branch in tree.items()
        for key, value in _flatten(branch, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _cannot_write(path: Path, error: OSError) -> str:
    return (
        f"cannot write the run directory {path}: {error.strerror or error}. "
        "Choose one on a file system that you can write, with space left, with run.dir=PATH."
    )
