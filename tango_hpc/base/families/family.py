"""The facts that tell one family of dense decoders from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Scales:
    """Constant factors: of attention scores (None: 1 / sqrt of a head's size), of embeddings, of what a block adds to
    the residual, and of logits.
    """

    attention: float | None = None
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class Family:
    """A family of dense decoders: gated feed-forward parts, RMS norms, rotary positions, grouped queries.

    members: published models, by their names on the Hugging Face hub.
    norms: in front of each block, after it, or both. `norm_adds_one`: a norm multiplies by 1 + weight.
    qk_norm: of each head of queries and keys ("head"), of all heads together ("all"), or none.
    fused: the checkpoint holds q, k and v as one tensor, and gate and up as one.
    windows: no layer attends to a window only, all do (where config.json gives a window), or layers do by their kind.
    rope_by_kind: rotary settings may differ by the kind of the layer. `rope_partial`: part of a head may be left out.
    rope_types: the rotary kinds that may be asked for.
    defaults: the sizes that transformers takes where config.json says nothing.
    scales: the factors, from config.json.
    refused: settings that must have no value, or a false one. Those of `ALWAYS_REFUSED` come on top.
    also: what else it has, for people.
    """

    model_type: str
    members: tuple[str, ...]
    norms: Literal["before", "after", "both"] = "before"
    norm_adds_one: bool = False
    qk_norm: Literal["head", "all"] | None = None
    qkv_bias: bool = False
    fused: bool = False
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    activation_key: str = "hidden_act"
    windows: Literal["none", "all", "by kind"] = "none"
    rope_by_kind: bool = False
    rope_partial: bool = False
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    scales: Callable[[Mapping[str, Any]], Scales] = lambda config: Scales()
    refused: tuple[str, ...] = ("use_sliding_window", "attention_bias")
    also: str = ""


ALWAYS_REFUSED = ("mlp_bias", "quantization_config")

# The norms of a layer in checkpoints, by their place in the trainer's layer.
NORMS: dict[str, dict[str, str]] = {
    "before": {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"},
    "after": {
        "post_attention_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    "both": {
        "input_layernorm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
