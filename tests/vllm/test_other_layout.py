"""A run that goes on in another layout, with another number of ranks too: the same questions, seeds and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import RolloutRow, read_rollouts
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.stages.convert import export_run
from tests.helpers.attempts import Attempt, make_attempts
from tests.helpers.runs import prepare_small_run

SETTINGS = (
    "train.generator_steps=3",  # v g g g
    "train.eval_every=0",
    "algorithm.entropy_coef=0.5",  # models that know nothing earn no rewards, and would learn nothing
    "checkpoint.keep=9",
)
# From two ranks (generator tensor 2 and rollout 1, verifier data parallel) to one, in the middle of step 2; from there,
# at a point where nothing was computed in between, to a pipeline of two with engines cut in two.
ONE_RANK = ("launch.tasks_per_node=1", "generator.parallel.tensor=1")
PIPELINE = (
    "launch.tasks_per_node=2", "generator.parallel.pipeline=2", "generator.rollout.tensor=2",
    "verifier.parallel.tensor=2", "verifier.rollout.tensor=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDirectory]:
    folder = tmp_path_factory.mktemp("other layouts")
    made = {name: prepare_small_run(folder / name, *SETTINGS)[1] for name in ("straight", "moved")}
    path = {name: str(directory.path) for name, directory in made.items()}
    attempts = [
        Attempt(path["straight"]),
        Attempt(path["moved"], stop=("rollout", 2)),
        Attempt(path["moved"], stop=("verify", 1), settings=ONE_RANK),
        Attempt(path["moved"], settings=PIPELINE),
    ]
    assert [task.code for task in make_attempts(folder, attempts)] == [0, 85, 85, 0]
    return made


def states(folder: Path) -> dict[str, Any]:
    """All tensors of a role in a checkpoint, put together from the shares of whoever wrote it."""
    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_the_states_are_the_same_bits(runs: dict[str, RunDirectory], role: str) -> None:
    folder = runs["moved"].checkpoints / "train"
    before, after = (states(folder / f"step_000001+{phase}" / role) for phase in ("rollout", "verify"))
    assert {name.partition(".")[0] for name in before} >= {"optimizer", "decoder"} and before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert any("exp_avg_sq" in name and before[name].any() for name in before) == (role == "verifier")


def dump(directory: RunDirectory, role: str, step: int) -> list[RolloutRow]:
    return read_rollouts(directory.rollout_file(role, step))


def test_the_order_of_data_and_the_seeds_are_the_same(runs: dict[str, RunDirectory]) -> None:
    for role, step in (("verifier", 1), ("generator", 2), ("generator", 3), ("generator", 4)):
        straight, moved = (dump(runs[name], role, step) for name in ("straight", "moved"))
        assert [(row.question, row.group_id) for row in moved] == [(row.question, row.group_id) for row in straight]
        same = [
            list(ours.response_ids) == list(theirs.response_ids) for ours, theirs in zip(moved, straight, strict=True)
        ]
        assert sum(same) >= len(same) - 1, f"{role}, step {step}: {same}"  # one may stand on an edge between two tokens
        for ours, theirs in zip(moved, straight, strict=True):
            if ours.response_ids == theirs.response_ids:
                assert ours.response_logprobs == pytest.approx(theirs.response_logprobs, abs=1e-3)
    steps = [[(row["step"], row["role"]) for row in read_metrics(runs[name])] for name in ("straight", "moved")]
    assert steps[0] == steps[1] and len(steps[0]) == 4


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_the_weights_end_where_those_of_one_layout_do(runs: dict[str, RunDirectory], role: str, tmp_path: Path) -> None:
    weights = {}
    for name, directory in runs.items():
        export_run(directory.path, role, tmp_path / name)
        weights[name] = load_file(tmp_path / name / "model.safetensors")
    start = load_file(runs["straight"].path / f"models/{role}_sft/model.safetensors")
    change = sum((weights["straight"][name] - start[name].float()).square().sum() for name in start)
    difference = sum((weights["moved"][name] - weights["straight"][name]).square().sum() for name in start)
    assert change > 0
    assert difference <= 1e-4 * change, f"{float(difference / change):.1e} of the change, squared"
