"""The place of every element of an adapter, as PEFT stores it, in a trainer's parameters. Pure Python.

The trainer fuses queries, keys and values, and gate and up, into one weight. Its adapter has the A of each part, one
on top of the other, and one B whose rows are those rows of the weight that have an adapter. Both are cut with the
weight: where ranks share out its rows, A is whole on each and B cut; where they share out its columns, B is whole.

r: rank. n: parts of a weight that have an adapter. K: inputs of this rank's weight, N: its rows with an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape, hf_tensors
from tango_hpc.models.layout.trainer_layout import LocalParam, Piece

# How tensor ranks cut the linear weights of a layer.
_CUT: dict[str, Literal["rows", "columns"]] = {
    "self_attention.linear_qkv.weight": "rows",
    "self_attention.linear_proj.weight": "columns",
    "mlp.linear_fc1.weight": "rows",
    "mlp.linear_fc2.weight": "columns",
}
_PARTS = {"self_attention.linear_qkv.weight": "qkv", "mlp.linear_fc1.weight": ("gate", "up")}
# Of the parameters, beside the weight.
A, B = "lora_A", "lora_B"
_PEFT = "base_model.model."  # in front of a module's name in PEFT's files


@dataclass(frozen=True)
class AdaptedWeight:
    """The adapter of one of this rank's weights.

    `a`: [n r, K]. `b`: [N, r]. `rows` says for each run of rows of B: (first row of B, first row of the weight, number
    of rows, part).
    """

    cut: Literal["rows", "columns"]
    a: LocalParam
    b: LocalParam
    num_parts: int
    rows: tuple[tuple[int, int, int, int], ...]


def adapter_targets(shape: ModelShape, target_modules: Literal["all-linear"] | tuple[str, ...]) -> list[str]:
    """Return the names of the linear layers with an adapter, in the model's order. Raises UserError for one that the
    model does not have.
    """
    known = [name.split(".")[-2] for name in _linear_tensors(shape) if name.startswith("model.layers.0.")]
    wanted = known if target_modules == "all-linear" else list(target_modules)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = ", ".join(unknown) or "no layer"
        raise UserError(f"{what}: choose of {', '.join(known)} or all-linear")
    return [name for name in known if name in wanted]


def peft_tensors(shape: ModelShape, rank: int, targets: list[str]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the adapter in PEFT's form."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in _linear_tensors(shape).items():
        if name.split(".")[-2] in targets:
            a, b = peft_names(name)
            found[a], found[b] = (rank, columns), (rows, rank)
    return found


def by_parameter(weights: Mapping[str, AdaptedWeight]) -> dict[str, LocalParam]:
    """Return the places of all A and B, by the names of the parameters."""
    found: dict[str, LocalParam] = {}
    for name, weight in weights.items():
        module = name.removesuffix("weight")
        found |= {f"{module}{A}": weight.a, f"{module}{B}": weight.b}
    return found


def adapter_layout(
    shape: ModelShape, rank: int, targets: list[str], weights: Mapping[str, LocalParam]
) -> dict[str, AdaptedWeight]:
    """Return the adapter of each of this rank's `weights` that has one, by the name of the weight.

    `weights` are those of `megatron_layout`. Raises UserError where a rank would have an adapter without rows.
    """
    found = {}
    for name, weight in weights.items():
        kind = ".".join(name.split(".")[-3:])
        if kind not in _CUT:
            continue
        of_layer = weight.pieces[0].tensor.rsplit(".", 3)[0]
        if kind in _PARTS:
            whole = shape.projections()
            tensors = list(dict.fromkeys(f"{of_layer}.{whole[part][0]}.weight" for part in _PARTS[kind]))
        else:
            tensors = [weight.pieces[0].tensor]
        tensors = [tensor for tensor in tensors if tensor.split(".")[-2] in targets]
        if tensors:
            found[name] = _adapted(_CUT[kind], weight, tensors, rank)
    return found


def _adapted(cut: Literal["rows", "columns"], weight: LocalParam, tensors: list[str], rank: int) -> AdaptedWeight:
    columns = weight.pieces[0].box[1]
    width = columns[1] - columns[0]
    a_pieces = [
        Piece(peft_names(tensor)[0], ((0, rank), columns), ((part * rank, (part + 1) * rank), (0, width)))
        for part, tensor in enumerate(tensors)
    ]
    b_pieces, rows, at = [], [], 0
    for piece in weight.pieces:
        if piece.tensor not in tensors:
            continue
        count = piece.size[0]
        b_pieces.append(Piece(peft_names(piece.tensor)[1], (piece.box[0], (0, rank)), ((at, at + count), (0, rank))))
        rows.append((at, piece.local[0][0], count, tensors.index(piece.tensor)))
        at += count
    if not at:
        raise UserError(
            f"a tensor rank has no rows of {', '.join(name.split('.')[-2] for name in tensors)}; name q_proj too, or"
            " take a smaller parallel.tensor"
        )
    a = LocalParam((len(tensors) * rank, width), tuple(a_pieces))
    return AdaptedWeight(cut, a, LocalParam((at, rank), tuple(b_pieces)), len(tensors), tuple(rows))


def _linear_tensors(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the linear weights of all layers: (rows, columns)."""
    return {
        name: (size[0], size[1])
        for name, size in hf_tensors(shape).items()
        if name.startswith("model.layers.") and len(size) == 2
    }


def peft_names(tensor: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a weight of the model."""
    module = f"{_PEFT}{tensor.removesuffix('weight')}"
    return f"{module}lora_A.weight", f"{module}lora_B.weight"
