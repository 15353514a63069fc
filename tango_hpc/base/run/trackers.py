"""The scalars of metrics.jsonl and evaluations.jsonl for programs that draw curves: TensorBoard, Weights & Biases,
MLflow.

A tracker never ends a run: one that fails is reported once and left out from then on. None of them needs a network:
Weights & Biases writes a folder for `wandb sync`, and MLflow a database file, unless `WANDB_MODE` or
`MLFLOW_TRACKING_URI` says otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.types import TrackerName

PROJECT = "tango_hpc"  # of Weights & Biases, experiment of MLflow


class Tracker(Protocol):
    """A library that draws scalars."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add finite values of one step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """One folder of event files per stage; what comes again after a resume is purged."""

    def __init__(self, directory: RunDirectory, stage: str, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory.tensorboard / stage), purge_step=resumed_step + 1, flush_secs=10)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write one event for each value."""
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """One run per attempt, in the group of the run directory, over an axis of optimizer steps; keys begin with the
    stage.
    """

    def __init__(self, directory: RunDirectory, stage: str, resumed_step: int) -> None:
        import wandb

        directory.trackers.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=os.environ.get("WANDB_RUN_GROUP", directory.path.name),
            name=f"{directory.path.name} {stage}" + (f" from {resumed_step}" if resumed_step else ""),
            dir=str(directory.trackers),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={"run.dir": str(directory.path), "stage": stage},
        )
        self._stage, self._step = stage, f"{stage}/step"
        self._run.define_metric(self._step)
        self._run.define_metric(f"{stage}/*", step_metric=self._step)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write one row."""
        self._run.log({**{f"{self._stage}/{key}": value for key, value in scalars.items()}, self._step: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """One run per attempt, tagged with run directory and stage. The next attempt ends that of one that was killed."""

    def __init__(self, directory: RunDirectory, stage: str, resumed_step: int) -> None:
        from mlflow.tracking import MlflowClient

        directory.trackers.mkdir(exist_ok=True)
        self._client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{directory.trackers / 'mlflow.db'}")
        )
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        number = self._experiment(name)
        place = {"run.dir": str(directory.path), "stage": stage}
        for left in self._client.search_runs([number], "attributes.status = 'RUNNING'"):
            if place.items() <= left.data.tags.items():
                self._client.set_terminated(left.info.run_id, status="KILLED")
        tags = place | {"resumed_step": str(resumed_step)}
        self._run = self._client.create_run(number, tags=tags, run_name=f"{directory.path.name} {stage}").info.run_id

    def _experiment(self, name: str) -> str:
        """Return the experiment's number; of several runs that begin at once, one makes it."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Send one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(key, value, now, step) for key, value in scalars.items()])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


_TRACKERS: dict[TrackerName, Callable[[RunDirectory, str, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def missing_trackers(names: Sequence[TrackerName]) -> list[str]:
    """Return a message for each tracker whose library is not installed here, with the way out."""
    return [
        f"run.trackers: {name} is not installed here; pip install {name}, or leave it out"
        for name in names
        if name != "tensorboard" and find_spec(name) is None
    ]


class Trackers:
    """The chosen trackers as one that does not fail. `tell` gets one line for each tracker that fails."""

    def __init__(
        self,
        names: Sequence[TrackerName],
        directory: RunDirectory,
        stage: str,
        resumed_step: int,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._open: dict[TrackerName, Tracker] = {}
        for name in names:
            try:
                self._open[name] = _TRACKERS[name](directory, stage, resumed_step)
            except Exception as error:
                self._gave_up(name, error)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add finite values of one step to each."""
        self._each(lambda tracker: tracker.log(scalars, step))

    def close(self) -> None:
        """Close each."""
        self._each(lambda tracker: tracker.close())
        self._open.clear()

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                do(tracker)
            except Exception as error:
                del self._open[name]
                self._gave_up(name, error)

    def _gave_up(self, name: str, error: Exception) -> None:
        reason = (str(error).splitlines() or [""])[0]
        self._tell(f"{name} failed and gets nothing more ({type(error).__name__}: {reason}); metrics.jsonl has it all.")
