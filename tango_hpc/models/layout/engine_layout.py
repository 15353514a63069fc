"""The place of every element of a Hugging Face checkpoint in vLLM's parameters. Pure Python.

vLLM fuses q, k and v as [q; k; v] of the rank's own heads, gate and up as [gate; up], pads the vocabulary to a
multiple of 64 rows before it cuts it, and gives each rank a copy of one KV head where there are fewer of them than
ranks. A tied output layer shares the embedding's parameter. Names, with their layer's global number, are those of
`model.named_parameters()`; `tango_hpc.models.engine.weights` checks them and the shapes against the engine itself.
"""

from __future__ import annotations

from tango_hpc.base.model_shape import ModelShape, padded_vocab_size
from tango_hpc.models.layout.trainer_layout import Box, LocalParam, Piece, whole


def engine_layout(shape: ModelShape, tensor_size: int, tensor_rank: int) -> dict[str, LocalParam]:
    """Return every parameter of one rank's vLLM model, by its name there, with the checkpoint's pieces that fill it."""
    params = {"model.embed_tokens.weight": _vocabulary(shape, "model.embed_tokens.weight", tensor_size, tensor_rank)}
    parts = shape.projections()
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        for name, size in shape.norms().values():
            params[f"{prefix}.{name}.weight"] = whole(f"{prefix}.{name}.weight", size)
        for kind, trailing in (("weight", (shape.hidden_size,)), ("bias", ())):
            if kind == "weight" or shape.kind.qkv_bias:
                blocks = []
                for name in "qkv":
                    start, count = _heads(shape, name, tensor_size, tensor_rank)
                    blocks.append((f"{prefix}.{parts[name][0]}.{kind}", parts[name][1] + start, count))
                params[f"{attention}.qkv_proj.{kind}"] = _stack(blocks, trailing)
        q_size = shape.num_heads * shape.head_dim
        params[f"{attention}.o_proj.weight"] = _columns(
            f"{attention}.o_proj.weight", shape.hidden_size, q_size, tensor_size, tensor_rank
        )
        count = shape.intermediate_size // tensor_size
        params[f"{prefix}.mlp.gate_up_proj.weight"] = _stack(
            [
                (f"{prefix}.{tensor}.weight", first + tensor_rank * count, count)
                for tensor, first, _ in (parts["gate"], parts["up"])
            ],
            (shape.hidden_size,),
        )
        params[f"{prefix}.mlp.down_proj.weight"] = _columns(
            f"{prefix}.mlp.down_proj.weight", shape.hidden_size, shape.intermediate_size, tensor_size, tensor_rank
        )
    params["model.norm.weight"] = whole("model.norm.weight", shape.hidden_size)
    if not shape.tied:
        params["lm_head.weight"] = _vocabulary(shape, "lm_head.weight", tensor_size, tensor_rank)
    return params


def _heads(shape: ModelShape, name: str, tensor_size: int, tensor_rank: int) -> tuple[int, int]:
    """Return first row and number of rows of the rank's query, key or value heads."""
    if name == "q":
        count = shape.num_heads // tensor_size
        return tensor_rank * count * shape.head_dim, count * shape.head_dim
    if tensor_size > shape.num_kv_heads:  # ranks share a head
        return tensor_rank * shape.num_kv_heads // tensor_size * shape.head_dim, shape.head_dim
    count = shape.num_kv_heads // tensor_size
    return tensor_rank * count * shape.head_dim, count * shape.head_dim


def _vocabulary(shape: ModelShape, tensor: str, tensor_size: int, tensor_rank: int) -> LocalParam:
    """Return the rank's rows of the padded vocabulary; a rank may hold padding only."""
    rows = padded_vocab_size(shape.vocab_size, tensor_size) // tensor_size
    start = tensor_rank * rows
    count = max(0, min(shape.vocab_size - start, rows))
    whole = (0, shape.hidden_size)
    pieces = (Piece(tensor, ((start, start + count), whole), ((0, count), whole)),) if count else ()
    return LocalParam((rows, shape.hidden_size), pieces)


def _stack(blocks: list[tuple[str, int, int]], trailing: tuple[int, ...]) -> LocalParam:
    """Return row blocks of (tensor, first row, number of rows) on top of each other."""
    pieces, offset = [], 0
    rest: Box = tuple((0, size) for size in trailing)
    for tensor, first, count in blocks:
        pieces.append(Piece(tensor, ((first, first + count), *rest), ((offset, offset + count), *rest)))
        offset += count
    return LocalParam((offset, *trailing), tuple(pieces))


def _columns(tensor: str, rows: int, total: int, tensor_size: int, tensor_rank: int) -> LocalParam:
    count = total // tensor_size
    start = tensor_rank * count
    piece = Piece(tensor, ((0, rows), (start, start + count)), ((0, rows), (0, count)))
    return LocalParam((rows, count), (piece,))
