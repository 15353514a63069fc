"""Random tiny Hugging Face checkpoints for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tango_hpc.base.model_shape import ModelShape, hf_tensors

_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
}  # fmt: skip
# Settings that their published members have, in small: windows, kinds of layers, scaled positions, factors. Heads of
# 32, the smallest that vLLM has attention for on a CPU.
_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 7},
    "olmo2": {"hidden_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "olmo3": {
        "hidden_size": 128, "num_hidden_layers": 4, "sliding_window": 7, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
            "attention_factor": 1.2079441541679836,
        },
    },
    "smollm3": {"hidden_size": 128, "num_hidden_layers": 4, "rope_theta": 5000000.0},
    "gemma3_text": {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 7, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 40, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "phi3": {
        "hidden_size": 128, "sliding_window": 7, "partial_rotary_factor": 0.75, "max_position_embeddings": 16384,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(12)],
            "long_factor": [1.0 + 0.3 * i for i in range(12)],
        },
    },
    "granite": {
        "hidden_size": 128, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
}  # fmt: skip
_UNTIED = {"llama", "mistral", "olmo2", "olmo3"}


def tiny_hf_config(family: str = "qwen2", **dims: Any) -> dict[str, Any]:
    """A `config.json` of two small layers with grouped queries and a vocabulary that needs padding."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 107,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family not in _UNTIED,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,  # its row of the embedding would not be trained in transformers
    }
    if family == "gemma3_text":
        del config["hidden_act"]
    return {**config, **_SETTINGS.get(family, {}), **dims}


def make_tiny_hf(directory: Path | str, family: str = "qwen2", *, seed: int = 0, **dims: Any) -> Path:
    """Write `config.json` and `model.safetensors` of a random model of `family`; `dims` override the config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_hf_config(family, **dims)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    sizes = {key: value for key, value in config.items() if not key.startswith("rope")}  # which may not be trainable
    shape = ModelShape.from_hf_config(sizes)
    ones = 0.0 if shape.kind.norm_adds_one else 1.0
    for name, size in hf_tensors(shape).items():
        values = torch.randn(size, generator=generator)
        # Norms around 1; matrices scaled so that logits spread over a few units.
        tensors[name] = ones + 0.1 * values if name.endswith("norm.weight") else 0.08 * values
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
