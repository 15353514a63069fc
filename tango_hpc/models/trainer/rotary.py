"""Rotary position frequencies of a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tango_hpc.base.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3")


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return radians per position of each pair of dimensions: [head_dim / 2], float32.

    Reads `rope_theta` and `rope_scaling`, or `rope_parameters` of newer configs. Only scalings that do not depend
    on the length of the sequence can be trained packed: default, linear and llama3.
    """
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    theta = float(rope["rope_theta"] or 10000.0)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise UserError(f"rope type {kind!r} of the model is not supported; supported are {', '.join(ROPE_TYPES)}")
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError("partial_rotary_factor other than 1 is not supported")
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
