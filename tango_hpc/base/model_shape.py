"""The sizes of a dense decoder, the tensors of its Hugging Face checkpoint, and how they can be cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import is_number, json_object

# vLLM pads the vocabulary to a multiple of 64 too, so equal tensor sizes give equal embedding slices.
VOCAB_MULTIPLE = 64

# Of launch.dtype.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}

_FAMILIES = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder; everything that decides which tensors exist and their shapes."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face `config.json`; UserError names what this package cannot train."""
        family = _FAMILIES.get(str(config.get("model_type")))
        if family is None:
            raise UserError(
                f"model_type {config.get('model_type')!r} is not supported; "
                f"use one of the dense families {', '.join(sorted(_FAMILIES))}"
            )
        needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if config.get(key) is None]
        if missing:
            raise UserError(f"config.json of the model lacks {', '.join(missing)}")
        problems = []
        if config.get("use_sliding_window"):
            problems.append("use_sliding_window=true")
        if config.get("mlp_bias"):
            problems.append("mlp_bias=true")
        if family != "qwen2" and config.get("attention_bias"):
            problems.append("attention_bias=true")
        if config.get("hidden_act", "silu") != "silu":
            problems.append(f"hidden_act={config['hidden_act']!r}")
        problems += rope_problems(config)
        if problems:
            raise UserError(f"config.json of the model asks for what is not supported: {', '.join(problems)}")
        num_heads = int(config["num_attention_heads"])
        shape = cls(
            family=family,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
        if shape.num_heads % shape.num_kv_heads:
            raise UserError(
                f"num_attention_heads={shape.num_heads} is no multiple of num_key_value_heads={shape.num_kv_heads}"
            )
        return shape

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters, without vocabulary padding."""
        return sum(math.prod(size) for size in hf_tensors(self).values())


# The rotary kinds that do not depend on the length of a sequence, and what each needs besides `rope_theta`.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config.json: `rope_theta`, `rope_type` and what the kind needs besides.

    Older configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`.
    """
    rope = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    rope["rope_theta"] = rope["rope_theta"] or 10000.0
    rope["rope_type"] = str(rope.get("rope_type") or rope.get("type") or "default")
    return rope


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what the trainer lacks of a config.json's rotary positions."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, Mapping):
            return [f"{key}={config[key]!r}"]
    rope = rope_settings(config)
    nested = [str(key) for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        return [f"rope_parameters that differ by kind of layer ({', '.join(nested)})"]
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        return [f"rope type {kind!r} (supported are {', '.join(ROPE_TYPES)})"]
    needed = ("rope_theta", *ROPE_TYPES[kind])
    problems = [f"rope type {kind!r} without a number for {key}" for key in needed if not is_number(rope.get(key))]
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']!r}")
    return problems


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the Hugging Face checkpoint (a tied output layer is no tensor)."""
    hidden, q_size, kv_size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = (size, hidden)
            if shape.qkv_bias:
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = (size,)
        if shape.qk_norm:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = (shape.head_dim,)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = (shape.head_dim,)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q_size)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[f"{prefix}.mlp.up_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = (hidden, shape.intermediate_size)
    tensors["model.norm.weight"] = (hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    return tensors


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Return rows of the embedding with padding: the next multiple of 64 that `tensor_size` ranks can share."""
    multiple = math.lcm(VOCAB_MULTIPLE, tensor_size)
    return -(-vocab_size // multiple) * multiple


def pipeline_stages(num_layers: int, pipeline_size: int) -> list[range]:
    """Return layers of each pipeline stage.

    Equal shares where they exist. Otherwise the first and the last stage, which also hold the embedding and the
    output layer, take what is left over by equal shares of the stages between them (126 layers on 16 stages are
    7, 14 times 8, and 7).
    """
    if num_layers % pipeline_size == 0:
        counts = [num_layers // pipeline_size] * pipeline_size
    else:
        middle = -(-num_layers // pipeline_size)
        left = num_layers - middle * (pipeline_size - 2)
        counts = [-(-left // 2), *[middle] * (pipeline_size - 2), left // 2]
    if min(counts) < 1:
        raise UserError(f"{num_layers} layers cannot be spread over {pipeline_size} pipeline stages; use fewer stages")
    starts = [sum(counts[:stage]) for stage in range(pipeline_size)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def check_rollout_tensor(shape: ModelShape, tensor_size: int) -> None:
    """Raise UserError with every reason why vLLM cannot cut the model over `tensor_size` ranks."""
    problems = []
    if shape.num_heads % tensor_size:
        problems.append(f"{shape.num_heads} attention heads are not divisible by rollout tensor size {tensor_size}")
    if shape.num_kv_heads % tensor_size and tensor_size % shape.num_kv_heads:
        problems.append(
            f"{shape.num_kv_heads} key/value heads and rollout tensor size {tensor_size} do not divide each other"
        )
    if shape.intermediate_size % tensor_size:
        problems.append(
            f"intermediate size {shape.intermediate_size} is not divisible by rollout tensor size {tensor_size}"
        )
    if VOCAB_MULTIPLE % tensor_size:
        problems.append(f"rollout tensor size {tensor_size} does not divide {VOCAB_MULTIPLE}, vLLM's vocabulary unit")
    if problems:
        raise UserError("; ".join(problems))


def check_parallel(shape: ModelShape, tensor_size: int, pipeline_size: int) -> None:
    """Raise UserError with every reason why the model cannot be cut this way."""
    problems = []
    if shape.num_heads % tensor_size:
        problems.append(f"{shape.num_heads} attention heads are not divisible by tensor size {tensor_size}")
    if max(shape.num_kv_heads, tensor_size) % min(shape.num_kv_heads, tensor_size):
        problems.append(f"{shape.num_kv_heads} key/value heads and tensor size {tensor_size} do not divide each other")
    if shape.intermediate_size % tensor_size:
        problems.append(f"intermediate size {shape.intermediate_size} is not divisible by tensor size {tensor_size}")
    try:
        pipeline_stages(shape.num_layers, pipeline_size)
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))


def indexed_files(index: Path) -> list[str]:
    """Return names of the files that a Hugging Face `*.index.json` gives the tensors to. Raises `UserError` where it is
    none.
    """
    names = (json_object(index.read_bytes()) or {}).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} is damaged, or was not downloaded whole; get the model again")
    return sorted(set(names.values()))
