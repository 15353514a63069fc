"""What ranks on GPUs find in their environment: no multicast of NCCL unless asked for, no expandable segments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tango_hpc.base.config import config_to_yaml
from tango_hpc.commands import doctor
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.gpu_environment import prepare_gpu_environment
from tests.slurm.jobs import counting_config

NVLS, NEW, OLD = "NCCL_NVLS_ENABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
# Starts as a task of a rank does, up to where its processes are started.
PREPARE = """
import json, os, sys
from tango_hpc.stages import rank
from tango_hpc.base.run.directory import RunDirectory

prepare = rank.prepare_gpu_environment
def before_torch():
    assert "torch" not in sys.modules, "PyTorch may have read the variables"
    return prepare()
rank.prepare_gpu_environment = before_torch
rank.prepare_stage(RunDirectory.open(sys.argv[1]), "sft")
print(json.dumps({name: os.environ.get(name) for name in sys.argv[2:]}))
"""


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb:128"),
        ("max_split_size_mb:128, expandable_segments : True", "max_split_size_mb:128"),
        (
            "roundup_power2_divisions:[256:1,>:8],expandable_segments:True,garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.8",
        ),
    ],
)
@pytest.mark.parametrize("name", [NEW, OLD])
def test_one_field_is_taken_out_and_the_log_says_so(name: str, given: str, kept: str | None) -> None:
    env = {name: given, "HOME": "/home/me"}
    (line,) = prepare_gpu_environment(env)
    assert env == {"HOME": "/home/me", NVLS: "0"} | ({} if kept is None else {name: kept})
    assert f"expandable_segments:True is taken out of {name} (now {kept or 'unset'})" in line


def test_what_does_no_harm_stays() -> None:
    env = {NEW: "expandable_segments:False,max_split_size_mb:128", OLD: "backend:native", NVLS: "1"}
    before = dict(env)
    assert prepare_gpu_environment(env) == [] and env == before


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        ("cuda", {}, {NVLS: "0", NEW: None}),
        ("cuda", {NVLS: "2", NEW: "expandable_segments:True"}, {NVLS: "2", NEW: None}),
        ("cpu", {NEW: "expandable_segments:True"}, {NVLS: None, NEW: "expandable_segments:True"}),
    ],
)
def test_a_rank_has_it_before_pytorch_is_imported(
    tmp_path: Path, device: str, given: dict[str, str], found: dict[str, str | None]
) -> None:
    config = counting_config(tmp_path, "run", {"device": device, "nodes": 1})
    directory, _ = enter_run(config.run.dir, config_to_yaml(config), resume=False, stage="sft")
    words = [sys.executable, "-P", "-c", PREPARE, str(directory.path), NVLS, NEW]
    done = subprocess.run(words, env=os.environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *log, environment = done.stdout.splitlines()
    assert json.loads(environment) == found
    assert any("is taken out of PYTORCH_ALLOC_CONF" in line for line in log) == (device == "cuda" and NEW in given)


def test_doctor_tells_of_expandable_segments(tmp_path: Path) -> None:
    """Of this machine's environment or of the profile's; not where a config is for CPUs."""
    on_gpu, on_cpu = (counting_config(tmp_path, device, {"device": device}) for device in ("cuda", "cpu"))
    env = {OLD: "max_split_size_mb:128,expandable_segments:True"}
    for config in (None, on_gpu):
        (finding,) = (finding for finding in doctor._gpu(config, env) if OLD in finding.text)
        assert finding.level == "warn" and "custom all-reduce" in finding.text and "without" in finding.remedy
    assert not [finding for finding in doctor._gpu(on_cpu, env) if OLD in finding.text]
