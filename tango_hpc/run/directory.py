"""The run directory: the name of every file of a run.

RUN/
  config.yaml         the resolved configuration
  provenance.json     code, versions, host and command of every attempt   (launch/provenance.py)
  metrics.jsonl       one object per optimizer step           (run/metrics.py)
  evaluations.jsonl   one object per evaluation in the loop   (run/metrics.py)
  tensorboard/        the same numbers, one folder per stage
  rollouts/           Parquet dumps of responses              (run/dumps.py)
  checkpoints/        everything needed to continue
  logs/               output of the ranks
  progress.json       what the run is doing now               (run/progress.py)
  summary.json        results                                 (run/summary.py)
  report.html         plots                                   (run/report.py)
  control/            locks, attempts, jobs (launch/attempts.py), the request to stop (control/stop.py)
  heartbeat/ outcomes/   what each rank does, how it ended    (control/)
  snapshot/           the code                                (launch/snapshot.py)
"""

from __future__ import annotations

import os
from pathlib import Path

from tango_hpc.errors import UserError


class RunDirectory:
    """Knows the path of every file of one run. Making one touches nothing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run directory at `path`; raises UserError where there is none."""
        directory = cls(path)
        if not directory.config.is_file():
            what = "has no config.yaml" if directory.path.is_dir() else "does not exist"
            raise UserError(f"{directory.path} is not a run directory: it {what}. Give the run.dir of a run.")
        return directory

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
        """Who runs here, and requests to a running job."""
        return self.path / "control"

    @property
    def stop_file(self) -> Path:
        """While this file exists the run saves at its next safe point and ends."""
        return self.control / "stop"

    @property
    def outcomes(self) -> Path:
        """One file per rank that has ended."""
        return self.path / "outcomes"

    @property
    def heartbeats(self) -> Path:
        """One file per rank, touched as it advances."""
        return self.path / "heartbeat"

    @property
    def snapshot(self) -> Path:
        """The code that a submitted job runs, copied at submission."""
        return self.path / "snapshot"

    def outcome_file(self, rank: int) -> Path:
        """How `rank` ended, written by itself; absent where it was killed."""
        return self.outcomes / f"rank_{rank:05d}.json"

    def crash_file(self, rank: int) -> Path:
        """Where Python writes the stacks of `rank` when it crashes; empty while it runs."""
        return self.outcomes / f"rank_{rank:05d}.crash"

    def heartbeat_file(self, rank: int) -> Path:
        """When `rank` last advanced, and where it was."""
        return self.heartbeats / f"rank_{rank:05d}.json"

    def rank_log(self, rank: int) -> Path:
        """Output of `rank`."""
        return self.logs / f"rank_{rank:05d}.log"

    def rollout_file(self, role: str, step: int) -> Path:
        """Dump of the rollouts of `role` at optimizer step `step`."""
        return self.rollouts / f"{role}_step_{step:06d}.parquet"
