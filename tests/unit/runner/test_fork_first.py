"""On GPUs a task forks its processes before it imports anything that may start CUDA; on CPUs it imports first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tango_hpc.base.config import config_to_yaml
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.environment import free_port
from tango_hpc.runner.outcome import read_outcome
from tango_hpc.stages.stage import STAGES
from tests.helpers import gpu_node
from tests.helpers.runs import small_config

# It stands for a package that starts CUDA while it is imported.
NOTES_ITS_PROCESS = """
import os
with open(os.environ["TEST_NOTES"], "a") as file:
    file.write(f"{os.getpid()} ")
"""
HEAVY = ("torch", "transformers", "megatron", "vllm", "flashinfer")


def make_run(folder: Path, stage: str, device: str) -> RunDirectory:
    config = small_config(
        folder / "run", f"launch.device={device}", "launch.tasks_per_node=1", "generator.parallel.tensor=1"
    )
    return enter_run(config.run.dir, config_to_yaml(config), resume=False, stage=stage)[0]


def environment(folder: Path, flashinfer: str, **variables: str) -> dict[str, str]:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return os.environ | place | {"PYTHONPATH": gpu_node.add_flashinfer(folder, flashinfer)} | variables


@pytest.mark.parametrize(("device", "in_the_task"), [("cuda", False), ("cpu", True)])
def test_a_package_that_starts_cuda_is_imported_after_the_fork_on_gpus_alone(
    tmp_path: Path, device: str, in_the_task: bool
) -> None:
    directory, notes = make_run(tmp_path, "sft", device), tmp_path / "notes"
    words = [*gpu_node.COMMAND, str(directory.path), "sft"]
    task = subprocess.Popen(words, env=environment(tmp_path, NOTES_ITS_PROCESS, TEST_NOTES=str(notes)))
    assert task.wait(timeout=300) != 0  # there are no models, and no GPU
    (imported_by,) = notes.read_text().split()
    assert (int(imported_by) == task.pid) == in_the_task


@pytest.mark.parametrize("stage", STAGES)
def test_before_the_fork_a_task_on_gpus_imports_nothing_heavy(tmp_path: Path, stage: str) -> None:
    directory = make_run(tmp_path, "train", "cuda")
    code = (
        "import sys\nfrom tango_hpc.stages.rank import prepare_stage\nfrom tango_hpc.base.run.directory import"
        f" RunDirectory\nprepare_stage(RunDirectory({str(directory.path)!r}), {stage!r})\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert set(HEAVY) & set(done.stdout.split()) == set()


def test_a_process_whose_parent_has_started_cuda_says_so_and_is_not_tried_again(tmp_path: Path) -> None:
    directory = make_run(tmp_path, "sft", "cuda")
    words = [*gpu_node.COMMAND, str(directory.path), "sft"]
    variables = {gpu_node.CUDA_STARTED: "1"}
    assert subprocess.run(words, env=environment(tmp_path, "", **variables), check=False).returncode == 78
    outcome = read_outcome(directory, Worker(0, "trainer"))
    assert outcome is not None and (outcome.code, outcome.phase) == (78, "loading libraries")
    assert "CUDA was started in the process that this one was forked from" in outcome.error
    assert "\n" not in outcome.error and outcome.traceback == ""
