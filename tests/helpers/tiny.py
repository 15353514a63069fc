"""Random tiny Hugging Face checkpoints for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tango_hpc.base.model_shape import ModelShape, hf_tensors

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


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
        "tie_word_embeddings": family != "llama",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "qwen3":
        config["head_dim"] = 32
    return {**config, **dims}


def make_tiny_hf(directory: Path | str, family: str = "qwen2", *, seed: int = 0, **dims: Any) -> Path:
    """Write `config.json` and `model.safetensors` of a random model of `family`; `dims` override the config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_hf_config(family, **dims)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    sizes = {key: value for key, value in config.items() if not key.startswith("rope")}  # which may not be trainable
    for name, size in hf_tensors(ModelShape.from_hf_config(sizes)).items():
        values = torch.randn(size, generator=generator)
        # Norms around 1; matrices scaled so that logits spread over a few units.
        tensors[name] = 1 + 0.1 * values if name.endswith("norm.weight") else 0.08 * values
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
