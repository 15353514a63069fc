"""Rotary frequencies and windows, against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from tango_hpc.base.model_shape import ModelShape
from tango_hpc.models.trainer.rotary import LayerPositions, Rotary, model_config, model_positions
from tests.helpers.tiny import tiny_hf_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def positions_of(config: dict[str, Any], max_tokens: int = 64) -> tuple[list[Rotary], list[LayerPositions]]:
    return model_positions(model_config(config), ModelShape.from_hf_config(config), max_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 10000.0},
        {"rope_theta": 1000000.0, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 10000.0, "rope_scaling": YARN},
    ],
)
def test_frequencies_match_transformers(settings: dict[str, Any]) -> None:
    config = {key: value for key, value in tiny_hf_config("llama").items() if key != "rope_theta"} | settings
    expected = LlamaRotaryEmbedding(model_config(config))
    ([rotary], layers) = positions_of(config)
    torch.testing.assert_close(rotary.frequencies_P, expected.inv_freq, rtol=1e-6, atol=0)
    assert rotary.scale == expected.attention_scaling and layers == [LayerPositions()] * 2


@pytest.mark.parametrize(
    ("family", "module"), [("olmo3", Olmo3RotaryEmbedding), ("gemma3_text", Gemma3RotaryEmbedding)]
)
def test_kinds_of_layers_have_rotaries_and_windows_of_their_own(family: str, module: Any) -> None:
    config = tiny_hf_config(family)
    rotaries, layers = positions_of(config)
    expected = module(model_config(config))
    for rotary, kind in zip(rotaries, ("full_attention", "sliding_attention"), strict=True):
        torch.testing.assert_close(rotary.frequencies_P, getattr(expected, f"{kind}_inv_freq"), rtol=1e-6, atol=0)
        assert rotary.scale == getattr(expected, f"{kind}_attention_scaling")
    local, whole = LayerPositions(window=7, rotary=1), LayerPositions(window=None, rotary=0)
    assert layers == {"olmo3": [local, local, local, whole], "gemma3_text": [local, local, whole, local]}[family]


def test_longrope_takes_the_factors_that_fit_the_longest_sequence() -> None:
    config = tiny_hf_config("phi3", num_attention_heads=4)
    module = Phi3RotaryEmbedding(AutoConfig.for_model(**config))
    for length, factors in ((4096, "short_factor"), (4097, "long_factor")):
        ([rotary], _) = positions_of(config, length)
        plain = 1.0 / 10000.0 ** (torch.arange(0, 24, 2).float() / 24)
        expected = plain / torch.tensor(config["rope_scaling"][factors])
        torch.testing.assert_close(rotary.frequencies_P, expected, rtol=1e-6, atol=0)
        assert rotary.scale == module.attention_scaling > 1


def test_windows_and_layers_without_positions() -> None:
    assert [layer.window for layer in positions_of(tiny_hf_config("mistral"))[1]] == [7, 7]
    assert [layer.window for layer in positions_of(tiny_hf_config("mistral", sliding_window=None))[1]] == [None, None]
    assert [layer.rotary for layer in positions_of(tiny_hf_config("smollm3"))[1]] == [0, 0, 0, None]
    assert [layer.window for layer in positions_of(tiny_hf_config("qwen2", sliding_window=7))[1]] == [None, None]
