"""Folders of adapters that cannot be the start of a run are refused by name, before anything loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tango_hpc.base.config.roles import AdapterConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape, hf_tensors
from tango_hpc.models.layout.adapter_layout import adapter_layout, adapter_targets, peft_tensors
from tango_hpc.models.layout.peft_folder import adapter_in, check_peft_folder, peft_config
from tango_hpc.models.layout.trainer_layout import megatron_layout
from tests.helpers.tiny import tiny_hf_config

SHAPE = ModelShape.from_hf_config(tiny_hf_config())
ADAPTER = AdapterConfig(rank=4, alpha=8)


def write(folder: Path, adapter: AdapterConfig = ADAPTER, **changes: Any) -> AdapterConfig:
    """An adapter of the tiny model, as PEFT would write it but for `changes`; the settings that start from it."""
    targets = adapter_targets(SHAPE, adapter.target_modules)
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.zeros(size) for name, size in peft_tensors(SHAPE, adapter.rank, targets).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    values = peft_config(adapter, targets, Path("base")) | changes
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return adapter.model_copy(update={"path": folder})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported, LORA is"),
        ({"lora_dropout": 0.05}, "lora_dropout 0.05 is not supported"),
        ({"use_dora": True}, "use_dora true is not supported"),
        ({"bias": "all"}, 'bias "all" is not supported'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save ["lm_head"] is not supported'),
        ({"rank_pattern": {"q_proj": 8}}, 'rank_pattern {"q_proj": 8} is not supported'),
        ({"alpha_pattern": {"q_proj": 8}}, 'alpha_pattern {"q_proj": 8} is not supported'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the model's own weights"),
        ({"r": 8}, "its r is 8; set adapter.rank to that"),
        ({"lora_alpha": 16}, "its lora_alpha is 16; set adapter.alpha to that"),
        ({"use_rslora": True}, "its use_rslora is True; set adapter.use_rslora to that"),
    ],
)
def test_what_the_trainer_does_not_have_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    adapter = write(tmp_path / "a", **changes)
    with pytest.raises(UserError) as error:
        check_peft_folder(adapter, SHAPE)
    assert told in str(error.value) and str(tmp_path / "a") in str(error.value)


def test_an_adapter_as_it_is_can_be_the_start(tmp_path: Path) -> None:
    for name, given in (
        ("all", ADAPTER),
        ("some", ADAPTER.model_copy(update={"target_modules": ("q_proj", "down_proj"), "use_rslora": True})),
    ):
        adapter = write(tmp_path / name, given)
        check_peft_folder(adapter, SHAPE)
        read = adapter_in(tmp_path / name)
        assert read.scale == adapter.scale
        check_peft_folder(read, SHAPE)


def test_missing_damaged_and_other_tensors(tmp_path: Path) -> None:
    adapter = write(tmp_path / "a")
    some = ADAPTER.model_copy(update={"target_modules": ("q_proj",)})
    other = write(tmp_path / "b", some)
    with pytest.raises(UserError, match=r"it has q_proj; set adapter.target_modules to \[q_proj\]"):
        check_peft_folder(adapter.model_copy(update={"path": other.path}), SHAPE)
    wide = ModelShape.from_hf_config(tiny_hf_config(intermediate_size=128))
    with pytest.raises(UserError, match="gate_proj.lora_B.weight is 96x4 in it, and the model needs 128x4"):
        check_peft_folder(adapter, wide)
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        check_peft_folder(adapter, SHAPE)
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        check_peft_folder(adapter, SHAPE)
    file.unlink()
    with pytest.raises(UserError, match="no adapter in .*: it lacks adapter_model.safetensors"):
        check_peft_folder(adapter, SHAPE)


def test_modules_that_a_model_or_a_rank_does_not_have() -> None:
    with pytest.raises(UserError, match="qkv_proj: choose of q_proj, k_proj, v_proj, o_proj, gate_proj"):
        adapter_targets(SHAPE, ("q_proj", "qkv_proj"))
    with pytest.raises(UserError, match="no layer: choose of"):
        adapter_targets(SHAPE, ())
    # At tensor size 4 a rank has half a group of rows: queries and keys, or values.
    with pytest.raises(UserError, match="a tensor rank has no rows of v_proj; name q_proj too"):
        for rank in range(4):
            adapter_layout(SHAPE, 4, ["v_proj"], megatron_layout(SHAPE, 4, 1, rank, 0))


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_the_parts_cover_every_element_of_the_adapter(family: str, tensor_size: int) -> None:
    """What is cut once, what is whole as often as there are tensor ranks."""
    shape = ModelShape.from_hf_config(tiny_hf_config(family))
    tensors = peft_tensors(shape, 4, adapter_targets(shape, "all-linear"))
    linear = [name for name, size in hf_tensors(shape).items() if len(size) == 2 and ".layers." in name]
    assert len(tensors) == 2 * len(linear)
    counts = {name: torch.zeros(size, dtype=torch.int) for name, size in tensors.items()}
    for pipeline_rank in range(2):
        for tensor_rank in range(tensor_size):
            weights = megatron_layout(shape, tensor_size, 2, tensor_rank, pipeline_rank)
            for name, weight in adapter_layout(shape, 4, adapter_targets(shape, "all-linear"), weights).items():
                assert weight.a.shape[1] == weights[name].shape[1]
                for local in (weight.a, weight.b):
                    for piece in local.pieces:
                        counts[piece.tensor][tuple(slice(*span) for span in piece.box)] += 1
    for name, count in counts.items():
        by_columns = "o_proj" in name or "down_proj" in name
        cut = by_columns == ("lora_A" in name)
        assert set(count.unique().tolist()) == {1 if cut else tensor_size}
