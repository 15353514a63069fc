"""The place of every element of a Hugging Face checkpoint in Megatron-core's parameters. Pure Python.

A *box* is one half-open range per dimension. A `Piece` says that a box of a Hugging Face tensor equals a
same-shaped box of a local parameter; a `LocalParam` is a local parameter's shape and all its pieces. Import,
export and the weight-sync plan are all written in these terms. Parts of a local parameter that no piece covers
are vocabulary padding and hold zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tango_hpc.base.model_shape import ModelShape, padded_vocab_size, pipeline_stages

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """`box` of the Hugging Face tensor `tensor` equals `local` of the local parameter; both have one shape."""

    tensor: str
    box: Box
    local: Box

    @property
    def size(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def num_elements(self) -> int:
        """Number of elements in the piece."""
        return math.prod(self.size)


@dataclass(frozen=True)
class LocalParam:
    """Shape of one rank's parameter and the pieces of Hugging Face tensors that fill it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def megatron_layout(
    shape: ModelShape, tensor_size: int, pipeline_size: int, tensor_rank: int, pipeline_rank: int
) -> dict[str, LocalParam]:
    """Return every parameter of one rank's GPTModel, by its name there, with the checkpoint's pieces that fill it.

    Layers carry their local number. Replicated parameters (norms) appear on every tensor rank, and a tied
    embedding on both the first and the last pipeline stage.
    """
    cut = _TensorCut(tensor_size, tensor_rank)
    stages = pipeline_stages(shape.num_layers, pipeline_size)
    params: dict[str, LocalParam] = {}
    first, last = pipeline_rank == 0, pipeline_rank == pipeline_size - 1
    vocab = padded_vocab_size(shape.vocab_size, tensor_size)
    if first:
        params["embedding.word_embeddings.weight"] = cut.rows(
            vocab, [("model.embed_tokens.weight", 0, shape.vocab_size)], shape.hidden_size
        )
    for local, layer in enumerate(stages[pipeline_rank]):
        for name, param in _layer(shape, cut, f"model.layers.{layer}"):
            params[f"decoder.layers.{local}.{name}"] = param
    if last:
        params["decoder.final_layernorm.weight"] = whole("model.norm.weight", shape.hidden_size)
        if not (shape.tied and first):
            source = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
            params["output_layer.weight"] = cut.rows(vocab, [(source, 0, shape.vocab_size)], shape.hidden_size)
    return params


def _layer(shape: ModelShape, cut: _TensorCut, prefix: str) -> Iterator[tuple[str, LocalParam]]:
    """Return parameters of one transformer layer."""
    hidden = shape.hidden_size
    yield "self_attention.linear_qkv.weight", cut.rows(*_fused_qkv(shape, prefix, "weight"), hidden)
    if shape.kind.qkv_bias:
        yield "self_attention.linear_qkv.bias", cut.rows(*_fused_qkv(shape, prefix, "bias"))
    yield (
        "self_attention.linear_proj.weight",
        cut.columns(f"{prefix}.self_attn.o_proj.weight", hidden, shape.num_heads * shape.head_dim),
    )
    for name, (tensor, size) in shape.norms().items():
        yield f"{name}.weight", whole(f"{prefix}.{tensor}.weight", size)
    yield "mlp.linear_fc1.weight", cut.gate_up(shape, prefix)
    yield "mlp.linear_fc2.weight", cut.columns(f"{prefix}.mlp.down_proj.weight", hidden, shape.intermediate_size)


def _fused_qkv(shape: ModelShape, prefix: str, kind: str) -> tuple[int, list[tuple[str, int, int]]]:
    """Return rows of the full fused QKV: for each query group its query heads, its key head, its value head."""
    blocks = []
    dim, group_rows = shape.head_dim, shape.heads_per_group * shape.head_dim
    parts = shape.projections()
    for group in range(shape.num_kv_heads):
        for name, rows in (("q", group_rows), ("k", dim), ("v", dim)):
            tensor, first, _ = parts[name]
            blocks.append((f"{prefix}.{tensor}.{kind}", first + group * rows, rows))
    return shape.num_kv_heads * (group_rows + 2 * dim), blocks


def whole(tensor: str, size: int) -> LocalParam:
    """Return a vector that every rank holds in full."""
    return LocalParam((size,), (Piece(tensor, ((0, size),), ((0, size),)),))


@dataclass(frozen=True)
class _TensorCut:
    """The cut of one tensor rank's share out of full parameters."""

    size: int
    rank: int

    def span(self, total: int) -> tuple[int, int]:
        """Return this rank's range of `total` equal-sized entries."""
        assert total % self.size == 0, f"{total} entries on {self.size} ranks"
        return self.rank * total // self.size, (self.rank + 1) * total // self.size

    def rows(self, total: int, blocks: list[tuple[str, int, int]], *trailing: int) -> LocalParam:
        """Return a parameter cut by rows, whose full form stacks `blocks` of (tensor, first row, number of rows)."""
        start, stop = self.span(total)
        pieces, offset = [], 0
        whole = tuple((0, size) for size in trailing)
        for tensor, first, count in blocks:
            low, high = max(start, offset), min(stop, offset + count)
            if low < high:
                shift = first - offset
                pieces.append(
                    Piece(tensor, ((low + shift, high + shift), *whole), ((low - start, high - start), *whole))
                )
            offset += count
        return LocalParam((stop - start, *trailing), tuple(pieces))

    def columns(self, tensor: str, rows: int, total: int) -> LocalParam:
        """Return a matrix cut by columns."""
        start, stop = self.span(total)
        piece = Piece(tensor, ((0, rows), (start, stop)), ((0, rows), (0, stop - start)))
        return LocalParam((rows, stop - start), (piece,))

    def gate_up(self, shape: ModelShape, prefix: str) -> LocalParam:
        """Return the fused first MLP matrix: this rank's gate rows above its up rows."""
        start, stop = self.span(shape.intermediate_size)
        count, whole = stop - start, (0, shape.hidden_size)
        pieces = []
        for name, at in (("gate", 0), ("up", count)):
            tensor, first, _ = shape.projections()[name]
            box = ((first + start, first + stop), whole)
            pieces.append(Piece(f"{prefix}.{tensor}.weight", box, ((at, at + count), whole)))
        return LocalParam((2 * count, shape.hidden_size), tuple(pieces))
