"""What a job asks Slurm for beside GPUs, and how many threads a rank takes of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import UserError
from tango_hpc.commands import doctor, doctor_ranks
from tango_hpc.commands.cli import app
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.resources import asked_of_a_node, cpus_per_rank, node_memory
from tango_hpc.commands.submit import refused_by_slurm, script
from tango_hpc.runner.environment import threads_of_rank
from tango_hpc.runner.starters import rank_environment
from tango_hpc.stages.stage import SFT, TRAIN
from tests.helpers.recipes import arguments, recipe
from tests.slurm.jobs import counting_config

PAPER = Path(__file__).parents[3] / "configs/paper"
GIB = 2**30


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere near a model: the sizes of those that the paper's configs name are known by their names."""
    monkeypatch.chdir(tmp_path)


def load(name: str, *overrides: str) -> Config:
    return recipe(name, overrides)


def options(config: Config, profile: Profile, stages: str = "train") -> dict[str, str]:
    """The #SBATCH options of the script that Slurm would get."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script(stages, config, profile), re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("4x8/qwen_grpo_tango", "392G"),  # 350.5 GiB by the plan, a tenth more is 385.6
        ("1x8/qwen_grpo_tango", "528G"),  # 478.2, 526.0
        ("1x8/llama_grpo_tango", "552G"),  # 499.8, 549.8
    ],
)
def test_a_gpu_job_asks_for_eight_cpus_a_rank_and_for_the_memory_of_the_plan(name: str, memory: str) -> None:
    asked = options(load(name), Profile())
    assert (asked["cpus-per-task"], asked["mem"]) == ("8", memory)


def test_a_grace_hopper_node_gives_each_rank_its_grace_and_no_message_of_ll128() -> None:
    from tango_hpc.commands.profiles import load_profile, variables_here

    profile = load_profile("grace_hopper_like")
    asked = options(load("4x8/qwen_grpo_tango", "launch.nodes=4", "launch.tasks_per_node=4"), profile)
    assert (asked["cpus-per-task"], asked["gpus-per-node"], asked["mem"]) == ("72", "4", "0")
    variables = variables_here(profile.model_copy(update={"cache_dir": "/scratch"}))
    assert (variables["NCCL_PROTO"], variables["NCCL_NET"]) == ("^LL128", "AWS Libfabric")
    assert variables["FI_MR_CACHE_MONITOR"] == "userfaultfd" and variables["GLOO_SOCKET_IFNAME"] == "hsn0"


def test_the_profile_says_otherwise() -> None:
    config = load("4x8/qwen_grpo_tango")
    assert options(config, Profile(memory="0"))["mem"] == "0"
    assert options(config, Profile(memory="480G"))["mem"] == "480G"
    assert options(config, Profile(exclusive=True))["mem"] == "0"
    assert options(config, Profile(exclusive=True, memory="480G"))["mem"] == "480G"
    assert "mem" not in options(config, Profile(memory=None))
    per_gpu = options(config, Profile(sbatch={"mem-per-gpu": "60G"}))
    assert per_gpu["mem-per-gpu"] == "60G" and "mem" not in per_gpu
    assert options(config, Profile(cpus_per_rank=12))["cpus-per-task"] == "12"


def test_threads_that_the_config_sets_are_cpus_to_ask_for() -> None:
    config = load("4x8/qwen_grpo_tango", "launch.threads_per_rank=3")
    assert cpus_per_rank(config, Profile()) == 3 and cpus_per_rank(config, Profile(cpus_per_rank=12)) == 12


def test_a_job_of_several_stages_asks_for_the_fullest(tmp_path: Path) -> None:
    config = load("4x8/qwen_grpo_tango")
    assert options(config, Profile(), "sft,train")["mem"] == options(config, Profile())["mem"] == "392G"
    assert options(config, Profile(), "sft")["mem"] == "48G"  # 8 trainers of 5.125 GiB: 41.0, and a tenth more
    evaluation = load("eval_qwen", "generator.model.path=models/Qwen2.5-Math-7B")
    assert options(evaluation, Profile(), "eval")["mem"] == "320G"  # 286.9, 315.6
    assert options(load("teacher"), Profile(), "teacher")["mem"] == "224G"  # 196.5, 216.2


def test_an_array_asks_for_the_cell_that_needs_most() -> None:
    cells = [load("4x8/qwen_grpo_tango"), load("4x8/llama_grpo_tango"), load("4x8/qwen_grpo_vanilla")]
    needed = [TRAIN.node_bytes(cell) for cell in cells]
    assert max(needed) == needed[1]
    assert node_memory(cells, [TRAIN], Profile()) == node_memory(cells[1:2], [TRAIN], Profile())


def test_a_cpu_job_asks_for_one_cpu_a_rank_and_leaves_the_memory_to_the_cluster(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run")
    asked = options(config, Profile())
    assert asked["cpus-per-task"] == "1" and "mem" not in asked
    assert "this job uses no GPUs" in node_memory([config], [TRAIN], Profile()).why
    assert asked_of_a_node(config, Profile(), node_memory([config], [TRAIN], Profile())).startswith(
        "1 rank of 1 CPU, no "
    )
    assert options(config, Profile(memory="4G"))["mem"] == "4G"


def test_without_a_models_sizes_the_memory_is_left_to_the_profile_and_that_is_said(tmp_path: Path) -> None:
    model = tmp_path / "made by an earlier stage"
    config = load("4x8/qwen_grpo_tango")
    role = config.generator.model_copy(update={"model": config.generator.model.model_copy(update={"path": model})})
    unknown = config.model_copy(update={"generator": role})
    assert "mem" not in options(unknown, Profile())
    memory = node_memory([unknown], [TRAIN], Profile())
    asked = asked_of_a_node(unknown, Profile(), memory)
    assert asked.startswith("8 ranks of 8 CPUs, no amount of memory (the cluster's default; set memory in the profile")
    assert f"no config.json in {model}" in asked
    assert options(unknown, Profile(memory="0"))["mem"] == "0"


def test_a_dry_run_prints_what_is_asked(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["submit", "train", *arguments("4x8/qwen_grpo_tango"), "--dry-run"])
    assert isinstance(shown.exception, UserError)  # the models are not here, and submission would say so too
    assert "#SBATCH --mem=392G" in shown.stdout and "#SBATCH --cpus-per-task=8" in shown.stdout
    assert shown.stderr == "Each node is asked for 8 ranks of 8 CPUs, 392G memory (351 GiB by the plan and 10% more).\n"


def test_a_refusal_says_what_was_asked_and_what_changes_it() -> None:
    from submitit.core.utils import FailedJobError

    config = load("4x8/qwen_grpo_tango")
    memory = node_memory([config], [TRAIN], Profile(memory="0"))
    with pytest.raises(UserError) as caught, refused_by_slurm(asked_of_a_node(config, Profile(), memory)):
        raise FailedJobError("sbatch: error: Requested node configuration is not available")
    assert (
        str(caught.value)
        == "Slurm refused the job: sbatch: error: Requested node configuration is not available\nEach node was asked"
        " for 8 ranks of 8 CPUs, all its memory (the profile's memory); cpus_per_rank and memory of the profile"
        " change that"
    )
    with pytest.raises(UserError) as caught, refused_by_slurm("eight ranks"):
        raise FailedJobError("sbatch: error: Invalid account or account/partition combination specified")
    assert str(caught.value).endswith("combination specified")


def test_a_rank_takes_its_share_of_the_cores_and_at_most_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(device: str, *, env: dict[str, str] | None = None, **launch: Any) -> int:
        config = load("1x4/qwen_grpo_tango").launch.model_copy(update={"device": device, **launch})
        return threads_of_rank(config, env or {})

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    assert threads("cuda") == 6  # 24 cores, 4 ranks
    assert threads("cuda", tasks_per_node=2) == 8
    assert threads("cuda", tasks_per_node=32) == 1
    assert threads("cuda", env={"SLURM_CPUS_PER_TASK": "12"}) == 8
    assert threads("cuda", env={"SLURM_CPUS_PER_TASK": "4"}) == 4
    assert threads("cuda", threads_per_rank=16, env={"SLURM_CPUS_PER_TASK": "4"}) == 16
    assert threads("cpu") == 1 and threads("cpu", threads_per_rank=2) == 2


def test_a_gpu_ranks_libraries_are_told_as_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    environment = rank_environment(load("4x8/qwen_grpo_tango"))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "8"
    assert rank_environment(counting_config(tmp_path, "run"))["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("page", ["slurm/train.sbatch", "docs/on_your_cluster.md"])
def test_the_example_of_plain_sbatch_asks_for_what_submit_would(page: str) -> None:
    asked = options(load("4x8/qwen_grpo_tango"), Profile())
    words = [
        f"--{name}={asked[name]}" for name in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem")
    ]
    example = f"sbatch {' '.join(words)} slurm/train.sbatch configs/paper/qwen.yaml"
    assert example in (PAPER.parents[1] / page).read_text()


def test_the_doctor_names_an_allocation_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: name)
    config = counting_config(tmp_path, "run", {"nodes": 2, "tasks_per_node": 4})

    def told(nodes: int, tasks: str, *, started: bool) -> str:
        env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_TASKS_PER_NODE": tasks}
        finding = doctor_ranks._too_small(config, started=started, env=env)
        return f"{finding.text}: {finding.remedy}" if finding else ""

    assert told(2, "4(x2)", started=False) == told(2, "1(x2)", started=True) == ""
    assert (
        told(2, "4,2", started=False)
        == "this allocation has 2 node(s) of 2 task(s); the config wants launch.nodes=2 of launch.tasks_per_node=4: "
        "ask for --nodes=2 --ntasks-per-node=4, or give the doctor launch.nodes=2 launch.tasks_per_node=2"
    )
    assert told(1, "4", started=True).startswith("this allocation has 1 node(s) of 4 task(s); the config wants")
    assert doctor_ranks._too_small(config, started=False, env={}) is None


def test_the_doctor_knows_which_models_fine_tuning_writes(tmp_path: Path) -> None:
    config = load_config(Path(__file__).parents[3] / "configs/quickstart.yaml", [f"run.dir={tmp_path / 'run'}"])
    assert [(found.level, found.text) for found in doctor._inputs(config, [SFT, TRAIN])] == [
        ("ok", "sft: models and data are there"),
        ("warn", "train: its models are not there yet"),
    ]
    alone = config.model_copy(update={"sft": config.sft.model_copy(update={"generator": None, "verifier": None})})
    assert {found.level for found in doctor._inputs(alone, [SFT, TRAIN])} == {"fail"}
