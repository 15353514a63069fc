"""Room for the checkpoints of a run, before anything loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.models.engine.capacity import GIB
from tango_hpc.stages.stage import EVAL, SFT, TRAIN
from tests.unit.plan.test_plan import CONFIGS, make_config, trainer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(
        tmp_path, launch__dtype="float32", launch__tasks_per_node=4, algorithm__kl_coef=0.0, checkpoint__keep=2
    )


def parameters(shape: ModelShape, tensor: int) -> int:
    return trainer(shape=shape, tensor=tensor).sizes.trained


def test_a_checkpoint_is_weights_and_the_optimizers_state_of_both_roles(config: Config) -> None:
    """fp32 on four tensor ranks: 4 bytes of weights, which are their own main weights, and 8 of two moments."""
    by_hand = sum(4 * 12 * parameters(role_shape(config, name), 4) for name in ("generator", "verifier"))
    assert TRAIN.saved_bytes(config)[0] == by_hand
    plan = make_plan(config, gpu_gb=1000, node_gb=None)["checkpoint"]
    assert (plan["bytes"], plan["keep"], plan["disk_bytes"]) == (by_hand, 2, 3 * by_hand)
    assert make_plan(config, gpu_gb=1000, node_gb=None, stage=EVAL)["checkpoint"]["bytes"] is None


def test_the_half_billion_model_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run in float32 wrote 7.36 GiB for a role, as the error of a full disk said, a quarter of which were main
    weights that are not written any more.
    """
    monkeypatch.chdir(CONFIGS.parent)  # its prompts
    config = load_config(CONFIGS / "experiments/half_billion/tango.yaml", ["launch.dtype=float32"])
    assert TRAIN.saved_bytes(config)[0] / GIB == pytest.approx(2 * 0.75 * 7.36, abs=0.02)
    assert SFT.saved_bytes(config)[0] / GIB == pytest.approx(0.75 * 7.36, abs=0.01)  # one role at a time


@pytest.mark.parametrize(
    ("checkpoints", "free", "told"),
    [
        ([], 3.0, None),
        ([], 2.9, "checkpoints will need 3.0 times"),
        (["step_000010"], 2.0, None),
        (["step_000010"], 1.9, "checkpoints will need 2.0 times"),
        (["step_000010", "step_000020"], 1.0, None),
        (["step_000010", "step_000020", "step_000030"], 1.0, None),
        (["step_000010", "step_000020"], 0.9, "no room"),
    ],
)
def test_the_disk_has_room_for_those_to_come(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: list[str],
    free: float,
    told: str | None,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    for name in checkpoints:
        (directory.checkpoints / "train" / name).mkdir(parents=True)
    one = TRAIN.saved_bytes(config)[0]
    usage: Any = SimpleNamespace(free=int(free * one))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    if told == "no room":
        with pytest.raises(
            UserError,
            match=r"no room for a checkpoint: it takes .* GB, and .* GB are free at .*; make room, or set run\.dir",
        ):
            TRAIN.check_disk(directory, config)
        return
    note = TRAIN.check_disk(directory, config)
    assert (note is None) == (told is None)
    if note is not None and told is not None:
        needed = float(told.split()[-2]) * one
        assert f"will need {needed / 1e9:.1f} GB more ({one / 1e9:.1f} GB each, 2 kept and one being written)" in note
    assert EVAL.check_disk(directory, config) is None


def test_weights_alone_take_two_bytes_of_each_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole checkpoints, one being written and the weights of five steps; some of them are there already."""
    kept = {"keep": 2, "keep_weights": 5}
    config = make_config(tmp_path, launch__tasks_per_node=4, algorithm__kl_coef=0.0, checkpoint=kept)
    one = TRAIN.saved_bytes(config)[0]
    weights = sum(4 * 2 * parameters(role_shape(config, name), 4) for name in ("generator", "verifier"))
    plan = make_plan(config, gpu_gb=1000, node_gb=None)["checkpoint"]
    assert (plan["weights_bytes"], plan["keep_weights"]) == (weights, 5)
    assert plan["disk_bytes"] == 3 * one + 5 * weights
    directory, free = RunDirectory(tmp_path / "run"), [0]
    directory.path.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    for there, needed in ((0, 3 * one + 5 * weights), (1, 2 * one + 5 * weights), (4, one + 3 * weights)):
        for step in range(there):
            (directory.checkpoints / f"train/step_{step:06d}").mkdir(parents=True, exist_ok=True)
        free[0] = needed
        assert TRAIN.check_disk(directory, config) is None
        free[0] = needed - 1
        note = TRAIN.check_disk(directory, config)
        assert note is not None and "one being written, weights alone of 5)" in note
        assert "lower checkpoint.keep or keep_weights" in note


def test_what_a_killed_attempt_left_half_written_is_room(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt removes it before it writes anything: a job that is requeued must not be refused for it."""
    directory = RunDirectory(tmp_path / "run")
    one = TRAIN.saved_bytes(config)[0]
    half = directory.checkpoints / "train/.step_000010/generator/__0_weights.distcp"
    half.parent.mkdir(parents=True)
    with half.open("wb") as file:
        file.truncate(one)  # takes no room itself
    usage: Any = SimpleNamespace(free=one // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "will need" in str(TRAIN.check_disk(directory, config))
    half.unlink()
    with pytest.raises(UserError, match="no room for a checkpoint"):
        TRAIN.check_disk(directory, config)
