"""Rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tango_hpc.base.errors import UserError
from tango_hpc.models.trainer.rotary import rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 10000.0},
        {"rope_theta": 1000000.0, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
)
def test_frequencies_match_transformers(settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", hidden_size=256, num_attention_heads=2, head_dim=128, **settings)
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rope_frequencies(settings, 128), expected, rtol=1e-6, atol=0)


def test_scalings_that_depend_on_length_are_refused() -> None:
    with pytest.raises(UserError, match="rope type 'yarn'.*default, linear, llama3"):
        rope_frequencies({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64)
