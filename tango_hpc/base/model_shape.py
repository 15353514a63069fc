"""The sizes of a dense decoder, the tensors of its Hugging Face checkpoint, and how they can be cut."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tango_hpc.base.errors import UserError
from tango_hpc.base.families import FAMILIES, Family
from tango_hpc.base.families.family import ALWAYS_REFUSED, NORMS
from tango_hpc.base.files import is_number, json_object

# vLLM pads the vocabulary to a multiple of 64 too, so equal tensor sizes give equal embedding slices.
VOCAB_MULTIPLE = 64

# Of launch.dtype.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


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

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face `config.json`; UserError names what this package cannot train."""
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            raise UserError(_why_unknown(config))
        needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if config.get(key) is None]
        if missing:
            raise UserError(f"config.json of the model lacks {', '.join(missing)}")
        refused = [key for key in (*ALWAYS_REFUSED, *family.refused) if config.get(key)]
        problems = [f"{key}={json.dumps(config[key], default=str)}" for key in refused]
        activation = config.get(family.activation_key, family.activation)
        if activation != family.activation:
            problems.append(f"{family.activation_key}={activation!r}")
        problems += rope_problems(config)
        if problems:
            raise UserError(f"config.json of the model asks for what is not supported: {', '.join(problems)}")
        config = {**family.defaults, **config}
        num_heads = int(config["num_attention_heads"])
        shape = cls(
            family=family.model_type,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        if shape.num_heads % shape.num_kv_heads:
            raise UserError(
                f"num_attention_heads={shape.num_heads} is no multiple of num_key_value_heads={shape.num_kv_heads}"
            )
        return shape

    @property
    def kind(self) -> Family:
        """Return the facts of its family."""
        return FAMILIES[self.family]

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def num_parameters(self) -> int:
        """Number of distinct parameters, without vocabulary padding."""
        return sum(math.prod(size) for size in hf_tensors(self).values())

    def projections(self) -> dict[str, tuple[str, int, int]]:
        """Return for q, k, v, gate and up the tensor of a layer that holds it, its first row there, and its rows."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "gate": self.intermediate_size, "up": self.intermediate_size}
        block = {name: "self_attn" if len(name) == 1 else "mlp" for name in sizes}
        if not self.kind.fused:
            return {name: (f"{block[name]}.{name}_proj", 0, rows) for name, rows in sizes.items()}
        first = {"q": 0, "k": q_size, "v": q_size + kv_size, "gate": 0, "up": self.intermediate_size}
        fused = {"self_attn": "self_attn.qkv_proj", "mlp": "mlp.gate_up_proj"}
        return {name: (fused[block[name]], first[name], rows) for name, rows in sizes.items()}

    def norms(self) -> dict[str, tuple[str, int]]:
        """Return the norms of a layer by their name in the trainer: the tensor of the checkpoint, and its size."""
        found = {name: (tensor, self.hidden_size) for name, tensor in NORMS[self.kind.norms].items()}
        for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads)):
            if self.kind.qk_norm:
                size = self.head_dim * (heads if self.kind.qk_norm == "all" else 1)
                found[f"self_attention.{name}_layernorm"] = (f"self_attn.{name}_norm", size)
        return found


def _why_unknown(config: Mapping[str, Any]) -> str:
    """Return one line about a model of no supported family."""
    kinds = config.get("layer_types") or []
    name = str(config.get("model_type"))
    why = ""
    if any("expert" in key and value for key, value in config.items()) or "moe" in name or name == "mixtral":
        why = ", a mixture of experts,"
    elif any("mamba" in key or "linear_num" in key for key in config) or "linear_attention" in kinds:
        why = ", with linear or recurrent attention,"
    elif name == "gemma2":
        why = ", with soft caps,"
    elif "text_config" in config:
        why = ", with parts that are not for text,"
    return f"model_type {name!r}{why} is not supported; use one of the dense families {', '.join(sorted(FAMILIES))}"


# The rotary kinds that do not depend on the length of a sequence, and what each needs besides `rope_theta`. Of
# longrope a run takes the factors that fit the longest sequence that it allows, as vLLM does.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": (),
}


def rope_settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary settings of a config.json by kind of layer ("" where all layers have the same): `rope_theta`,
    `rope_type` and what the kind needs besides.

    Older configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`.
    """
    common = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    given = dict(config.get("rope_parameters") or {})
    nested = {str(key): value for key, value in given.items() if isinstance(value, Mapping)}
    found = {}
    for kind, settings in (nested or {"": given}).items():
        rope = {**common, **(config.get("rope_scaling") or {}), **settings}
        rope["rope_theta"] = rope["rope_theta"] or 10000.0
        rope["rope_type"] = str(rope.get("rope_type") or rope.get("type") or "default")
        found[kind] = rope
    return found


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what the trainer lacks of a config.json's rotary positions."""
    family = FAMILIES[str(config["model_type"])]
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, Mapping):
            return [f"{key}={config[key]!r}"]
    ropes = rope_settings(config)
    if not family.rope_by_kind and set(ropes) != {""}:
        return [f"rope_parameters that differ by kind of layer ({', '.join(ropes)})"]
    return list(dict.fromkeys(problem for rope in ropes.values() for problem in _problems_of_rope(rope, family)))


def _problems_of_rope(rope: Mapping[str, Any], family: Family) -> Iterator[str]:
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        yield f"rope type {kind!r} (supported are {', '.join(family.rope_types)})"
        return
    for key in ("rope_theta", *ROPE_TYPES[kind]):
        if not is_number(rope.get(key)):
            yield f"rope type {kind!r} without a number for {key}"
            return
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0) and not family.rope_partial:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']!r}"
    if kind == "yarn":
        usual = 0.1 * math.log(max(float(rope["factor"]), 1.0)) + 1.0
        if abs(float(rope.get("attention_factor") or usual) - usual) > 1e-6 or rope.get("mscale"):
            yield "rope type 'yarn' with an attention factor of its own"


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the Hugging Face checkpoint (a tied output layer is no tensor)."""
    hidden = shape.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    rows: dict[str, int] = {}
    for name, _, count in shape.projections().values():
        rows[name] = rows.get(name, 0) + count
    norms = dict(shape.norms().values())
    first = {name: size for name, size in norms.items() if name == "input_layernorm"}
    of_heads = {name: size for name, size in norms.items() if name.startswith("self_attn")}
    for layer in range(shape.num_layers):
        sizes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in first.items()}
        for name, count in rows.items():
            if name.startswith("self_attn"):
                sizes[f"{name}.weight"] = (count, hidden)
                sizes |= {f"{name}.bias": (count,)} if shape.kind.qkv_bias else {}
        sizes |= {f"{name}.weight": (size,) for name, size in of_heads.items()}
        sizes["self_attn.o_proj.weight"] = (hidden, shape.num_heads * shape.head_dim)
        sizes |= {f"{name}.weight": (size,) for name, size in norms.items() if name not in {*first, *of_heads}}
        sizes |= {f"{name}.weight": (count, hidden) for name, count in rows.items() if name.startswith("mlp")}
        sizes["mlp.down_proj.weight"] = (hidden, shape.intermediate_size)
        tensors |= {f"model.layers.{layer}.{name}": size for name, size in sizes.items()}
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
