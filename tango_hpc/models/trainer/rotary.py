"""Rotary position frequencies of a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import rope_problems, rope_settings


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return radians per position of each pair of dimensions: [head_dim / 2], float32.

    Raises UserError for kinds that depend on the length of the sequence: they cannot be trained packed.
    """
    problems = rope_problems(config)
    if problems:
        raise UserError(f"config.json of the model asks for what is not supported: {', '.join(problems)}")
    rope = rope_settings(config)
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Scale frequencies as Llama 3.1 does: stretch long wavelengths by `factor`, keep short ones, blend between."""
    context = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / float(rope["factor"])
