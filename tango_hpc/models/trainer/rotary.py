"""Where tokens are: the rotary frequencies of a model, and which layers have them and look how far back.

P: pairs of dimensions of a head that are rotated, the first 2 P of its dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tango_hpc.base.model_shape import ModelShape


@dataclass(frozen=True)
class Rotary:
    """Radians per position of each pair, [P] in float32, and the factor of the rotated numbers (yarn, longrope)."""

    frequencies_P: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class LayerPositions:
    """The positions of a layer: each token attends to itself and the `window` - 1 tokens before it (None: to all
    before it), rotated by the model's rotary of this number (None: not at all).
    """

    window: int | None = None
    rotary: int | None = 0


def model_config(hf_config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config.json with the defaults that transformers has for what it leaves out."""
    settings = dict(hf_config)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def model_positions(
    config: PreTrainedConfig, shape: ModelShape, max_tokens: int
) -> tuple[list[Rotary], list[LayerPositions]]:
    """Return the rotaries of a model, and the positions of each layer.

    `max_tokens` is the longest sequence of the run: longrope has factors for short and for long ones.
    """
    kinds = ["full_attention"] * shape.num_layers
    if shape.kind.windows == "by kind":
        kinds = list(config.layer_types)
    elif shape.kind.windows == "all" and config.sliding_window:
        kinds = ["sliding_attention"] * shape.num_layers
    nested = all(kind in config.rope_parameters for kind in kinds)
    names: list[str | None] = [*sorted(set(kinds))] if nested else [None]
    rotaries = [_rotary(config, shape, name, max_tokens) for name in names]
    has_rotary = getattr(config, "no_rope_layers", None) or [True] * shape.num_layers  # 1 where there are positions
    layers = [
        LayerPositions(
            window=config.sliding_window if kind == "sliding_attention" else None,
            rotary=(names.index(kind) if nested else 0) if rotated else None,
        )
        for kind, rotated in zip(kinds, has_rotary, strict=False)
    ]
    return rotaries, layers


def _rotary(config: PreTrainedConfig, shape: ModelShape, kind: str | None, max_tokens: int) -> Rotary:
    rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if rope["rope_type"] == "default":
        dims = int(shape.head_dim * (rope.get("partial_rotary_factor") or 1.0))
        exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        return Rotary(1.0 / float(rope["rope_theta"]) ** exponents)
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    frequencies, scale = compute(config, torch.device("cpu"), seq_len=max_tokens, layer_type=kind)
    return Rotary(frequencies.float(), float(scale))
