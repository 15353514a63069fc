"""The run directory: the name of every file of a run.

RUN/
  config.yaml         the resolved configuration
  provenance.json     code, versions, host and command of every attempt       (runner/provenance.py)
  metrics.jsonl       one object per optimizer step                           (base/run/metrics.py)
  evaluations.jsonl   one object per evaluation in the loop, step 0 included  (base/run/metrics.py)
  tensorboard/        the same numbers, one folder per stage
  trackers/           the same for Weights & Biases and MLflow, where asked for (base/run/trackers.py)
  rollouts/           Parquet dumps of responses                              (base/run/dumps.py)
  checkpoints/        everything needed to continue                           (models/trainer/checkpoints.py)
  logs/               output of every process of every rank, and of the supervisor
  progress.json       what the run is doing now                               (base/run/progress.py)
  summary.json        results                                                 (base/run/summary.py)
  expected.json       seconds of a step, predicted and measured               (stages/expectation.py)
  report.html         plots                                                   (report/run_page.py)
  control/lock        who runs here                                           (runner/lock.py)
  control/attempts.jsonl, jobs.json         who did, and what was submitted   (runner/attempts.py)
  control/stop        while it exists, the run saves and ends                 (runner/stop.py)
  heartbeat/          one file per process of a rank: what it does            (runner/heartbeat.py)
  outcomes/           one file per process that has ended: how                (runner/outcome.py)
  snapshot/           the code that a job runs, copied at submission          (runner/snapshot.py)
  method/             the files of a method of one's own, copied at the start  (stages/method_files.py)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.step_names import StepName
from tango_hpc.base.run.worker import Worker


class Below:
    """A file or folder below a run directory."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, directory: RunDirectory, _: type) -> Path:
        return directory.path.joinpath(*self._names)


class RunDirectory:
    """The path of every file of one run. Making one touches nothing."""

    config = Below("config.yaml")
    provenance = Below("provenance.json")
    metrics = Below("metrics.jsonl")
    evaluations = Below("evaluations.jsonl")
    tensorboard = Below("tensorboard")
    trackers = Below("trackers")
    rollouts = Below("rollouts")
    traces = Below("traces")
    checkpoints = Below("checkpoints")
    logs = Below("logs")
    srun_log = Below("logs", "srun.log")
    submitit_logs = Below("logs", "submitit")
    progress = Below("progress.json")
    summary = Below("summary.json")
    expected = Below("expected.json")
    report = Below("report.html")
    report_curves = Below("report_curves.png")
    control = Below("control")
    lock_file = Below("control", "lock")
    attempts_file = Below("control", "attempts.jsonl")
    jobs_file = Below("control", "jobs.json")
    stop_file = Below("control", "stop")
    rollbacks_file = Below("control", "rollbacks")
    heartbeats = Below("heartbeat")
    outcomes = Below("outcomes")
    snapshot = Below("snapshot")
    method = Below("method")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Return the run directory at `path`; raises UserError where there is none."""
        directory = cls(path)
        if not directory.config.is_file():
            what = "has no config.yaml" if directory.path.is_dir() else "does not exist"
            raise UserError(f"{directory.path} is not a run directory: it {what}. Give the run.dir of a run.")
        return directory

    def log_file(self, worker: Worker) -> Path:
        """Return output of `worker`; that of a rank as a whole ends when its processes have logs of their own."""
        return self.logs / f"{worker.stem}.log"

    def heartbeat_file(self, worker: Worker) -> Path:
        """Return when `worker` last advanced, and where it was."""
        return self.heartbeats / f"{worker.stem}.json"

    def outcome_file(self, worker: Worker) -> Path:
        """Return the file of `worker`'s outcome; absent where no process was left to write it."""
        return self.outcomes / f"{worker.stem}.json"

    def crash_file(self, worker: Worker) -> Path:
        """Return where Python writes the stacks of `worker` when it crashes; empty while it runs."""
        return self.outcomes / f"{worker.stem}.crash"

    def reserve_file(self, worker: Worker) -> Path:
        """Return room on the disk for the outcome of `worker`; there while it runs."""
        return self.outcomes / f"{worker.stem}.reserve"

    def rollout_file(self, role: str, step: int) -> Path:
        """Dump of the rollouts of `role` at optimizer step `step`."""
        return self.rollouts / f"{StepName(step, role=role)}.parquet"


def is_run(folder: Path) -> bool:
    """Return whether `folder` holds a run."""
    return (folder / "config.yaml").is_file() and (folder / "control").is_dir()


def runs_below(top: Path, *, depth: int | None = None, refused: list[str] | None = None) -> Iterator[Path]:
    """Return the runs in the folders below `top`, links to folders followed, at most `depth` folders down; each one
    once.

    Folders that may not be read are passed over, and their names come into `refused`.
    """
    seen: set[str] = set()

    def note(error: OSError) -> None:
        if refused is not None and isinstance(error, PermissionError):
            refused.append(error.filename)

    for place, below, _ in os.walk(top, followlinks=True, onerror=note):
        folder = Path(place)
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        if is_run(folder):
            yield folder
            below.clear()  # a run holds no runs, but maybe a great many files
        elif depth is not None and len(folder.relative_to(top).parts) >= depth:
            below.clear()
        # Folders before links to them: a run is known by its own name where both are found.
        below.sort(key=lambda name: (os.path.islink(os.path.join(place, name)), name))
