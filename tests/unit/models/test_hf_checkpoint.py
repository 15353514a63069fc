"""Model folders with something wrong: every problem named in one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape, hf_tensors
from tango_hpc.models.trainer.hf_io import check_checkpoint, read_config
from tests.helpers.tiny import make_tiny_hf


def shape_of(folder: Path) -> ModelShape:
    return ModelShape.from_hf_config(read_config(folder))


def test_good_folder(tmp_path: Path) -> None:
    folder = make_tiny_hf(tmp_path / "model")
    files = check_checkpoint(folder, shape_of(folder))
    assert files.keys() == hf_tensors(shape_of(folder)).keys()


def test_a_stored_tied_output_layer_is_accepted(tmp_path: Path) -> None:
    folder = make_tiny_hf(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight" not in check_checkpoint(folder, shape_of(folder))


def test_all_problems_are_named(tmp_path: Path) -> None:
    folder = make_tiny_hf(tmp_path / "model", family="llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(63)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        check_checkpoint(folder, shape_of(folder))
    for part in (
        "model.layers.1.self_attn.k_proj.weight is missing",
        "lm_head.weight is missing",
        "model.norm.weight is [63], should be [64]",
        "model.layers.0.self_attn.q_proj.bias is not part of the model",
    ):
        assert part in str(error.value)


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path)
    folder = make_tiny_hf(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors"):
        check_checkpoint(folder, shape_of(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no safetensors weights"):
        check_checkpoint(folder, shape_of(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(UserError, match="names files that are not there: model-00001-of-00002"):
        check_checkpoint(folder, shape_of(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_config(folder)
