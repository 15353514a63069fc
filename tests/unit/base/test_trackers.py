"""Trackers have what metrics.jsonl has, through the libraries themselves, and never end a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsWriter, read_metrics
from tango_hpc.stages.stage import SFT
from tests.helpers.extra_packages import install_beside
from tests.helpers.runs import small_config

WRITE = """
import sys
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsWriter
from tango_hpc.base.run.trackers import MLflow
directory = RunDirectory(sys.argv[1])
MLflow(directory, "sft", 0).log({"loss": 3.0}, 1)  # of attempts that were killed
MLflow(directory, "train", 0).log({"loss": 2.0}, 1)
for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    writer = MetricsWriter(directory, "train", resumed_step=resumed, trackers=("tensorboard", "wandb", "mlflow"))
    for step in steps:
        writer.write({"step": step, "role": "generator", "loss": 0.5 * step, "kl": float("nan"), "tokens/trained": 7})
    writer.write_evaluation(steps[-1], {"generator/accuracy": 0.25})
    writer.close()
"""
READ = """
import json, struct, sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2
folder = Path(sys.argv[1]) / "trackers"
client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
found = {"mlflow": [], "wandb": []}
runs = client.search_runs([client.get_experiment_by_name("tango_hpc").experiment_id], order_by=["attributes.start_time"])
for run in runs:
    keys = ("loss", "tokens/trained", "eval/generator/accuracy", "kl")
    history = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in keys}
    at = run.data.tags["stage"], run.data.tags["resumed_step"]
    found["mlflow"].append({"at": at, "status": run.info.status, **history})
for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
    data, at, rows = file.read_bytes(), 7, []  # a head of 7 bytes; then LevelDB's log format, here in one block
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1 and len(data) < 32768
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    found["wandb"].append(rows)
print(json.dumps(found))
"""


def test_wandb_and_mlflow_get_every_scalar_without_a_network(tmp_path: Path) -> None:
    packages = install_beside(tmp_path / "packages", "wandb", "mlflow-skinny", "sqlalchemy", "alembic")
    run = tmp_path / "a run"
    run.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(packages)])}

    def python(code: str) -> str:
        command = [sys.executable, "-P", "-c", code, str(run)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = python(WRITE)
    assert "gets nothing more" not in said, said
    found = json.loads(python(READ).splitlines()[-1])
    first = {"loss": [[1, 0.5], [2, 1.0], [3, 1.5]], "tokens/trained": [[1, 7], [2, 7], [3, 7]], "kl": []}
    again = {"loss": [[3, 1.5], [4, 2.0]], "tokens/trained": [[3, 7], [4, 7]], "kl": []}
    killed = {"tokens/trained": [], "eval/generator/accuracy": [], "kl": []}
    assert found["mlflow"] == [
        # Of another stage, which may be going on for all that is known.
        {"at": ["sft", "0"], "status": "RUNNING", "loss": [[1, 3.0]], **killed},
        {"at": ["train", "0"], "status": "KILLED", "loss": [[1, 2.0]], **killed},
        {"at": ["train", "0"], "status": "FINISHED", **first, "eval/generator/accuracy": [[3, 0.25]]},
        {"at": ["train", "2"], "status": "FINISHED", **again, "eval/generator/accuracy": [[4, 0.25]]},
    ]
    rows = [{"train/step": step, "train/loss": 0.5 * step, "train/tokens/trained": 7} for step in (1, 2, 3, 4)]
    asked = [{"train/step": step, "train/eval/generator/accuracy": 0.25} for step in (3, 4)]
    assert found["wandb"] == [[*rows[:3], asked[0]], [*rows[2:], asked[1]]]
    assert [path.name for path in run.iterdir() if path.name == "wandb"] == []


def test_tensorboard_shows_no_step_twice(tmp_path: Path) -> None:
    """An attempt that was killed before it saved anything, and the next one, which begins anew."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path)
    for losses in ((3.0, 2.0, 1.0), (9.0, 8.0)):
        writer = MetricsWriter(directory, "train", resumed_step=0, trackers=("tensorboard",))
        writer.write_evaluation(0, {"generator/accuracy": 0.25})
        for step, loss in enumerate(losses, 1):
            writer.write({"step": step, "role": "generator", "loss": loss})
        writer.close()
        time.sleep(1.1)  # files of events are ordered by the second
    events = EventAccumulator(str(directory.tensorboard / "train"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert [values for tag, values in found.items() if "loss" in tag] == [[(1, 9.0), (2, 8.0)]]


def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.tensorboard.write_text("no folder can be made here")
    said: list[str] = []
    with MetricsWriter(directory, "train", tell=said.append) as metrics:
        for step in (1, 2):
            metrics.write({"step": step, "role": "generator"})
    assert len(said) == 1 and said[0].startswith("tensorboard failed and gets nothing more (")
    assert [row["step"] for row in read_metrics(directory)] == [1, 2]


def test_one_that_is_not_installed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "run.trackers=[tensorboard,wandb]")
    with pytest.raises(UserError, match="run.trackers: wandb is not installed here; pip install wandb"):
        SFT.check_inputs(config)
