"""Real training on two Slurm nodes: four runs, three of them interrupted twice, one set of final weights.

The generator is split over the nodes (TP=2), the verifier is copied (DP=2). The run that is started from Python is left
alone. The one under plain sbatch gets USR2, then SIGTERM by `scancel --signal`. The one in a job array loses a rank by
SIGKILL, then meets `scontrol requeue`. One is stopped, goes on on a single node, is stopped there, and ends on two. All
four must end with the same weights and metrics.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tango_hpc.base.config import config_to_yaml
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.ending import stop
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.status import run_state, states
from tango_hpc.commands.submit import submit
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog
from tests.helpers.runs import computed, prepare_small_run, small_config
from tests.slurm.jobs import ROOT, processes_of, start_now, start_requeued, tango, tango_command, wait_until

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(1800)]

# Models and data lie outside the runs, for all of them.
OVERRIDES = ("launch.nodes=2", "launch.tasks_per_node=1", "launch.grace_seconds=50", "checkpoint.every_steps=1")


class Trained:
    """Three runs of the same configuration and what they left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prepared, _ = prepare_small_run(folder / "inputs", *OVERRIDES)
        (folder / "inputs" / "config.yaml").unlink()  # only its data and models are wanted
        self.shared = [
            f"data.train={prepared.data.train}",
            f"data.eval={prepared.data.eval}",
            f"generator.model.path={prepared.generator.model.path}",
            f"verifier.model.path={prepared.verifier.model.path}",  # type: ignore[union-attr]
        ]
        self.file = folder / "train.yaml"
        self.file.write_text(config_to_yaml(small_config(folder / "base", *OVERRIDES, *self.shared)))

    def wait(self, directory: RunDirectory, job: str) -> None:
        def over() -> bool:
            start_requeued(job)
            return states([directory])[0].is_over

        wait_until(over, lambda: explain(directory), timeout=600)

    def weights(self, directory: RunDirectory) -> dict[str, torch.Tensor]:
        found = {}
        last = max((directory.checkpoints / "train").glob("step_*"))
        for role in ("generator", "verifier"):
            flat = self.folder / f"{directory.path.name}-{role}.pt"
            dcp_to_torch_save(last / role, flat)
            for name, value in flatten(torch.load(flat, weights_only=False)):
                found[f"{role}.{name}"] = value
        return found


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(prefix, tree)]
    if isinstance(tree, dict):
        return [item for key, value in tree.items() for item in flatten(value, f"{prefix}/{key}")]
    if isinstance(tree, list | tuple):
        return [item for index, value in enumerate(tree) for item in flatten(value, f"{prefix}/{index}")]
    return []


def explain(directory: RunDirectory) -> str:
    logs = [*directory.logs.rglob("*.out"), *sorted(directory.logs.glob("rank_*.log"))]
    texts = [f"== {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs if log.exists()]
    return "\n".join([repr(states([directory])[0]), *map(repr, AttemptLog(directory).read()), *texts])


def rows(directory: RunDirectory) -> int:
    return len(directory.metrics.read_text().splitlines()) if directory.metrics.exists() else 0


def pid_of(directory: RunDirectory, worker: Worker) -> int:
    return json.loads(directory.heartbeat_file(worker).read_text())["pid"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("training on slurm") / "all of it")


@pytest.fixture(scope="module")
def straight(trained: Trained, cluster: list[str]) -> RunDirectory:
    """From Python, uninterrupted."""
    job = submit("train", trained.file, f"run.dir={trained.folder / 'python'}", profile=Profile(time="10"))
    trained.wait(job.directory, job.job_id)
    assert run_state(job.directory, {}).state == "done", explain(job.directory)
    logs = [log for log in job.directory.logs.rglob("*") if log.is_file() and log.suffix in (".log", ".out")]
    assert len(logs) > 4 and not [log for log in logs if "nanobind: leaked" in log.read_text()], (
        "of vLLM, when Python ends"
    )
    return job.directory


def same_run(trained: Trained, straight: RunDirectory, other: RunDirectory) -> None:
    expected, found = trained.weights(straight), trained.weights(other)
    assert expected.keys() == found.keys() and len(expected) > 40
    assert not [name for name, value in expected.items() if not torch.equal(value, found[name])]

    assert [*map(computed, read_metrics(straight))] == [*map(computed, read_metrics(other))]
    assert [row["step"] for row in read_metrics(other)] == [1, 2, 3, 4, 5, 6]


def interrupted(directory: RunDirectory, job: str, at_row: int, *words: str) -> Attempt:
    """Runs the command `words` once so many optimizer steps are done; the attempt that this ended, the job waiting
    again.
    """
    wait_until(lambda: rows(directory) >= at_row, lambda: explain(directory), timeout=600)
    number = len(AttemptLog(directory).read())
    slurm.run_command(*words)
    asked = time.monotonic()

    def ended() -> bool:
        return AttemptLog(directory).read()[number - 1].ended is not None

    wait_until(ended, lambda: explain(directory), timeout=600)
    print(f"{' '.join(words[:-1])}: {time.monotonic() - asked:.1f} s to the end of the attempt")
    return AttemptLog(directory).read()[number - 1]


def test_plain_sbatch_told_to_go_by_usr2_and_by_term(trained: Trained, straight: RunDirectory) -> None:
    path = f"{tango_command(trained.folder).parent}:{os.environ['PATH']}"
    directory = RunDirectory(trained.folder / "sbatch")
    done = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={trained.folder}/plain-%j.log",
         str(ROOT / "slurm" / "train.sbatch"), str(trained.file), f"run.dir={directory.path}"],
        env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = done.stdout.strip()
    # To the batch process alone, as Slurm does before the time limit; then to every rank.
    first = interrupted(directory, job, 2, "scancel", "--batch", "--signal=USR2", job)
    start_now(job)
    second = interrupted(directory, job, 4, "scancel", "--signal=TERM", job)
    trained.wait(directory, job)
    assert (first.code, second.code) == (85, 85) and first.saved_after != second.saved_after
    assert [attempt.code for attempt in AttemptLog(directory).read()] == [85, 85, 0], explain(directory)
    assert tango("logs", str(directory.path)).stdout.count(f"{trained.folder}/plain-{job}.log") == 1
    same_run(trained, straight, directory)


def test_a_job_array_with_a_killed_rank_and_a_requeue(trained: Trained, straight: RunDirectory) -> None:
    file = trained.folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"config": "train.yaml", "dir": str(trained.folder / "sweep"), "cells": [{}]}))
    profile = trained.folder / "profile.yaml"
    profile.write_text("time: '10'\n")
    tango("sweep", str(file), "--profile", str(profile))
    (path,) = (trained.folder / "sweep" / "cells").iterdir()
    directory = RunDirectory(path)
    job = states([directory])[0].job
    assert job is not None
    wait_until(lambda: rows(directory) >= 2, lambda: explain(directory), timeout=600)
    killed = time.monotonic()
    os.kill(pid_of(directory, Worker(1, "verifier")), signal.SIGKILL)
    wait_until(lambda: AttemptLog(directory).read()[0].ended is not None, lambda: explain(directory), timeout=600)
    wait_until(lambda: processes_of(job.partition("_")[0]) == [], lambda: explain(directory), timeout=60)
    assert time.monotonic() - killed < 60
    print(f"killed rank: {time.monotonic() - killed:.1f} s until no process of the job is left")
    start_now(job)
    second = interrupted(directory, job, 4, "scontrol", "requeue", job)
    trained.wait(directory, job)
    first, _, third = AttemptLog(directory).read()
    assert first.code == 1 and first.reason.startswith("rank 1 (verifier) on ") and "SIGKILL" in first.reason
    assert (second.code, third.code) == (85, 0), explain(directory)
    same_run(trained, straight, directory)


def test_on_another_number_of_nodes_and_back(trained: Trained, straight: RunDirectory) -> None:
    directory = RunDirectory(trained.folder / "moved")
    profile = trained.folder / "profile.yaml"
    profile.write_text("time: '10'\n")
    nodes = []

    def go_on(to_row: int, *words: str) -> str:
        """Submits it, waits for so many optimizer steps, and asks Slurm on how many nodes it is; the job."""
        tango("submit", "train", str(trained.file), f"run.dir={directory.path}", "--profile", str(profile), *words)
        job = states([directory])[0].job
        assert job is not None
        wait_until(lambda: rows(directory) >= to_row, lambda: explain(directory), timeout=600)
        nodes.append(slurm.run_command("squeue", "--noheader", f"--jobs={job}", "--format=%D").strip())
        return job

    for to_row, words in ((1, ()), (3, ("--resume", "launch.nodes=1", "launch.tasks_per_node=2"))):
        job = go_on(to_row, *words)
        stop(directory.path, Console())
        trained.wait(directory, job)
        assert states([directory])[0].state == "stopped" and rows(directory) < 6, explain(directory)
    trained.wait(directory, go_on(5, "--resume"))
    assert nodes == ["2", "1", "2"] and run_state(directory, {}).state == "done", explain(directory)
    same_run(trained, straight, directory)
