"""Adapters that are saved, loaded, moved and refused. Four ranks run every scenario once; the tests compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tango_hpc.base.config.roles import AdapterConfig, OptimizerConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
ADAPTER = AdapterConfig(rank=4, alpha=8)
VOCAB = 107


def make_policy(folder: Path, tensor: int, pipeline: int, **changes: Any) -> Any:
    settings = {"optimizer": OPTIMIZER, "total_steps": 10, "adapter": ADAPTER, "seed": "0 generator"}
    return policy_of(folder / changes.pop("model", "model"), tensor, pipeline, **settings | changes)


def train(policy: Any, steps: int) -> list[float]:
    return [policy.update_sft(random_sequences(8, VOCAB)).loss for _ in range(steps)]


def in_layouts(folder: Path) -> dict[str, Any]:
    """A start in several layouts; two steps, and two more from the checkpoint, in the same layout and in another."""
    for tensor, pipeline in ((1, 1), (2, 1), (2, 2), (4, 1)):
        make_policy(folder, tensor, pipeline).export_adapter(folder / f"start-{tensor}x{pipeline}")
    make_policy(folder, 1, 1, seed="0 verifier").export_adapter(folder / "start-verifier")
    found: dict[str, Any] = {}
    policy = make_policy(folder, 2, 1)
    train(policy, 2)
    policy.save(folder / "saved")
    found["losses"] = train(policy, 2)
    policy.export_adapter(folder / "straight")
    for tensor, pipeline in ((2, 1), (1, 2), (4, 1)):
        other = make_policy(folder, tensor, pipeline)
        other.load(folder / "saved")
        other.save(folder / f"saved by {tensor}x{pipeline}")
        found[f"{tensor}x{pipeline}"] = train(other, 2)
        other.export_adapter(folder / f"resumed-{tensor}x{pipeline}")
    back = make_policy(folder, 2, 1)
    back.load(folder / "saved by 4x1")
    found["back"] = train(back, 2)
    back.export_adapter(folder / "back")
    return found


def refused(folder: Path) -> dict[str, str]:
    """Checkpoints of another kind of adapter."""
    from tango_hpc.base.errors import CheckFailed

    make_policy(folder, 1, 1).save(folder / "adapted")
    make_policy(folder, 1, 1, adapter=None).save(folder / "whole")
    found = {}
    for name, saved, changes in (
        ("rank", "adapted", {"adapter": ADAPTER.model_copy(update={"rank": 8})}),
        ("alpha", "adapted", {"adapter": ADAPTER.model_copy(update={"alpha": 16.0})}),
        ("modules", "adapted", {"adapter": ADAPTER.model_copy(update={"target_modules": ("q_proj",)})}),
        ("no adapter", "adapted", {"adapter": None}),
        ("an adapter", "whole", {}),
        ("base", "adapted", {"model": "other"}),
    ):
        try:
            make_policy(folder, 1, 1, **changes).load(folder / saved)
            found[name] = ""
        except CheckFailed as error:
            found[name] = str(error)
    return found


def in_bfloat16(folder: Path) -> dict[str, Any]:
    """Updates far below one step of bfloat16, on two data-parallel ranks."""
    adapter = ADAPTER.model_copy(update={"path": folder / "large"})
    slow = OptimizerConfig(learning_rate=1e-6)
    policy = make_policy(folder, 2, 1, adapter=adapter, dtype="bfloat16", optimizer=slow)
    dtypes = {str(value.dtype) for value in policy.adapters.parameters().values()}
    train(policy, 4)
    policy.export_adapter(folder / "slow")
    policy.export_hf(folder / "slow merged")
    policy.save(folder / "slow saved")
    for tensor, pipeline in ((1, 1), (2, 2)):
        other = make_policy(folder, tensor, pipeline, adapter=adapter, dtype="bfloat16", optimizer=None)
        other.load(folder / "slow saved")
        other.export_hf(folder / f"slow merged in {tensor}x{pipeline}")
    return {"dtypes": dtypes}


def rounded_products(folder: Path) -> dict[str, Any]:
    """The same updates with products in float32 and in bfloat16."""
    return {name: train(make_policy(folder, 2, 1, products=name), 5) for name in ("float32", "bfloat16")}


def as_large_as_the_weights(folder: Path) -> dict[str, Any]:
    """Fine-tuning on one batch: all weights, and adapters whose rank is the layers' size."""
    whole = make_policy(folder, 2, 1, adapter=None)
    full = make_policy(folder, 2, 1, adapter=AdapterConfig(rank=64, alpha=64))
    return {"whole": train(whole, 30), "adapter": train(full, 30)}


SCENARIOS = (in_layouts, refused, in_bfloat16, rounded_products, as_large_as_the_weights)


def run_all(folder: Path) -> dict[str, Any]:
    return {scenario.__name__: scenario(folder) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter state")
    make_tiny_hf(folder / "model")
    make_tiny_hf(folder / "other")
    weights = load_file(folder / "other" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    save_file(weights, folder / "other" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    from tango_hpc.base.model_shape import ModelShape
    from tango_hpc.models.layout.adapter_layout import adapter_targets, peft_tensors
    from tango_hpc.models.layout.peft_folder import peft_config

    shape = ModelShape.from_hf_config(json.loads((folder / "model" / "config.json").read_text()))
    targets = adapter_targets(shape, "all-linear")
    generator = torch.Generator().manual_seed(5)
    large = {
        name: torch.randn(size, generator=generator) * 0.1
        for name, size in peft_tensors(shape, ADAPTER.rank, targets).items()
    }
    (folder / "large").mkdir()
    save_file(large, folder / "large" / "adapter_model.safetensors", metadata={"format": "pt"})
    values = peft_config(ADAPTER, targets, folder / "model")
    (folder / "large" / "adapter_config.json").write_text(json.dumps(values))
    return run_ranks(run_all, 4, folder, timeout=600)


def adapter_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_start_is_the_same_in_every_layout_and_another_for_each_role(results: Any, folder: Path) -> None:
    whole = adapter_in(folder / "start-1x1")
    for layout in ("2x1", "2x2", "4x1"):
        assert same(adapter_in(folder / f"start-{layout}"), whole)
    for name, value in whole.items():
        if "lora_B" in name:
            assert not value.any()
        else:  # PEFT's: uniform within 1 / sqrt(inputs)
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() < bound and abs(value.mean()) < 0.15 * bound
    other = adapter_in(folder / "start-verifier")
    assert all(not torch.equal(other[name], whole[name]) for name in whole if "lora_A" in name)


def test_resumed_is_uninterrupted_bit_for_bit(results: Any, folder: Path) -> None:
    found, straight = results[0]["in_layouts"], adapter_in(folder / "straight")
    assert found["2x1"] == found["losses"] and same(adapter_in(folder / "resumed-2x1"), straight)
    # Through another layout and back: nothing is lost on the way.
    assert found["back"] == found["losses"] and same(adapter_in(folder / "back"), straight)
    for layout in ("1x2", "4x1"):
        np.testing.assert_allclose(found[layout], found["losses"], rtol=1e-5)
        resumed = adapter_in(folder / f"resumed-{layout}")
        for name, value in straight.items():
            torch.testing.assert_close(resumed[name], value, atol=1e-4, rtol=0)


def test_another_kind_of_adapter_is_refused_on_every_rank(results: Any) -> None:
    for result in results:
        told = result["refused"]
        assert "rank was 4, is 8" in told["rank"]
        assert "alpha was 8.0, is 16.0" in told["alpha"]
        assert "target_modules was ['q_proj'," in told["modules"] and "is ['q_proj']" in told["modules"]
        assert "has an adapter, and the configuration asks for none" in told["no adapter"]
        assert "has no adapter, and the configuration asks for one" in told["an adapter"]
        assert "base was {'model.safetensors': " in told["base"]


def test_small_updates_in_bfloat16_are_kept(results: Any, folder: Path) -> None:
    assert results[0]["in_bfloat16"]["dtypes"] == {"torch.float32"}
    start, end = adapter_in(folder / "large"), adapter_in(folder / "slow")
    for name, value in start.items():
        moved = (end[name] - value).abs()
        assert 0 < moved.max() < 2**-9 * value.abs().max()  # less than a step of bfloat16
        assert torch.equal(end[name].bfloat16(), value.bfloat16()) or moved.max() < 1e-5
    base, merged = (load_file(folder / name / "model.safetensors") for name in ("model", "slow merged"))
    from_rounded = 0
    for name, value in merged.items():
        module = f"base_model.model.{name.removesuffix('weight')}"
        if f"{module}lora_A.weight" not in end:
            assert torch.equal(value, base[name].bfloat16())
            continue
        a, b = (end[f"{module}lora_{which}.weight"] for which in "AB")
        expected = base[name].double() + ADAPTER.scale * (b.double() @ a.double())
        assert (value.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
        assert torch.equal(value, expected.bfloat16())
        rounded = base[name].double() + ADAPTER.scale * (b.bfloat16().double() @ a.bfloat16().double())
        from_rounded += int((value != rounded.bfloat16()).sum())
    assert from_rounded > 1000  # the weights are not made from rounded adapters


def test_what_is_exported_in_another_layout_is_what_was_trained_bit_for_bit(results: Any, folder: Path) -> None:
    trained = load_file(folder / "slow merged" / "model.safetensors")
    for layout in ("1x1", "2x2"):
        assert same(load_file(folder / f"slow merged in {layout}" / "model.safetensors"), trained)


def test_products_in_bfloat16_are_rounded_and_learn_the_same(results: Any) -> None:
    exact, rounded = (results[0]["rounded_products"][name] for name in ("float32", "bfloat16"))
    assert exact != rounded
    np.testing.assert_allclose(rounded, exact, rtol=0.02)
    assert rounded[-1] < 0.9 * rounded[0]


def test_adapters_as_large_as_the_weights_learn_as_much(results: Any) -> None:
    whole, adapter = (results[0]["as_large_as_the_weights"][name] for name in ("whole", "adapter"))
    assert whole[0] == pytest.approx(adapter[0], abs=1e-6)
    assert whole[-1] < 0.2 * whole[0] and adapter[-1] < 0.2 * adapter[0]
