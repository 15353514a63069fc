"""What differs from cluster to cluster: how GPUs are asked for, and containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import RANKS_OF_TASK
from tango_hpc.commands.profiles import Profile, job_variables, load_profile
from tango_hpc.commands.submit import script
from tango_hpc.models.parallel.ranks import sees_one_gpu
from tango_hpc.runner.starters import SrunStarter
from tango_hpc.stages.stage import TRAIN


def gpu_config(run: str) -> Config:
    role = {"model": {"path": "/models/a"}}
    return Config.model_validate(
        {
            "run": {"dir": run}, "task": {"name": "math"}, "data": {"train": "/d/t", "eval": "/d/e"},
            "generator": role, "verifier": role, "launch": {"nodes": 4, "tasks_per_node": 8},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("request_by", "options"),
    [
        ("gpus-per-node", ["gpus-per-node=a100:8"]),
        ("gres", ["gres=gpu:a100:8"]),
        ("gpus-per-task", ["gpu-bind=none", "gpus-per-task=a100:1"]),  # else no rank reaches its peers' memory
    ],
)
def test_gpus_are_asked_for_as_the_cluster_wants(request_by: Any, options: list[str]) -> None:
    text = script("train", gpu_config("/scratch/me/run"), Profile(gpu_request=request_by, gpu_type="a100"))
    assert [line for line in text.splitlines() if "--g" in line] == [f"#SBATCH --{option}" for option in options]


def test_a_rank_that_sees_its_own_gpu_alone_takes_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Profile.model_validate({"gpu_request": "gpus-per-task", "sbatch": {"gpu-bind": "single:1"}})
    text = script("train", gpu_config("/scratch/me/run"), bound)
    assert "#SBATCH --gpu-bind=single:1\n" in text and text.count("--gpu-bind") == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.delenv(RANKS_OF_TASK, raising=False)
    assert sees_one_gpu(1) and not sees_one_gpu(8)
    monkeypatch.setenv(RANKS_OF_TASK, "8")  # one task for all ranks of a node, which has one GPU
    assert not sees_one_gpu(1)


def test_ranks_in_a_container_of_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = {
        "image": "/i/my image.sqsh",
        "mounts": ["/scratch", "/home/me:/home/me"],
        "options": ["--container-writable"],
    }
    for name, value in job_variables(Profile.model_validate({"pyxis": box})).items():
        monkeypatch.setenv(name, value)
    config = gpu_config(str(tmp_path))
    words = SrunStarter(RunDirectory(tmp_path), TRAIN, config).arguments()
    start = words.index("--container-image=/i/my image.sqsh")
    assert words[start + 1 : start + 3] == ["--container-mounts=/scratch,/home/me:/home/me", "--container-writable"]
    # The shell that ignores early signals runs inside too, and so does Python.
    assert words[start + 3] == "bash" and words[-6:] == [
        "python",
        "-P",
        "-m",
        "tango_hpc.stages.rank",
        str(tmp_path),
        "train",
    ]
    (tmp_path / "both.yaml").write_text(yaml.safe_dump({"pyxis": box, "apptainer": {"image": "a.sif"}}))
    with pytest.raises(UserError, match="name either apptainer or pyxis"):
        load_profile(str(tmp_path / "both.yaml"))
