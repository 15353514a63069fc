"""Low-rank adapters (Hu et al., arXiv 2106.09685), trained through the weights that the engine computes with.

A weight is W = round(W0 + s B A), rounded to the run's precision. Trainer and engine both multiply with W, so the
engine's log-probabilities are as close to the trainer's as without adapters. W is frozen in the forward and backward
passes. The gradients of A and B follow from those of y = x W^T: dB = s dy^T (x A^T) and dA = s (dy B)^T x. A and B
stay in float32.

T: tokens of a micro-batch. K: inputs and N: outputs of this rank's weight. r: rank, n: parts of a fused weight.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tango_hpc.base.config.roles import AdapterConfig
from tango_hpc.base.files import open_to_readers
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.models.layout.adapter_layout import (
    A,
    AdaptedWeight,
    B,
    adapter_layout,
    adapter_targets,
    by_parameter,
    peft_tensors,
)
from tango_hpc.models.layout.peft_folder import CONFIG, WEIGHTS, check_peft_folder, peft_config
from tango_hpc.models.layout.trainer_layout import LocalParam, megatron_layout
from tango_hpc.models.parallel.collectives import all_gather_objects
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.trainer.hf_io import ModelFiles, box_slices, gather_tensors
from tango_hpc.models.trainer.limits import PIECE

_OWN = object()  # stands for the A and B of the model, among values that weights are made from


class Adapters:
    """The adapters of this rank's part of a model, and the weights that are made from them.

    The weights are made when they are first needed after a change (`make`), not when A or B change.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: ModelShape,
        groups: PolicyGroups,
        config: AdapterConfig,
        base: ModelFiles,
        *,
        seed: str,
        rounds: bool,
    ) -> None:
        """Freeze `model`, and give its linear layers A and B: from `config.path`, or A random by `seed` and B zero.

        `rounds`: products of float32 layers round their operands to bfloat16 (`products`).
        """
        if config.path is not None:
            check_peft_folder(config, shape)
        self.config, self.scale, self._base = config, config.scale, base
        self.targets = adapter_targets(shape, config.target_modules)
        self.tensors = peft_tensors(shape, config.rank, self.targets)
        self.weights = adapter_layout(shape, config.rank, self.targets, base.layout)
        self.layout = by_parameter(self.weights)
        self._model, self._shape, self._groups = model, shape, groups
        model.requires_grad_(False)
        self._places: dict[str, _Place] = {}
        device = next(model.parameters()).device
        for name, module in _linears(model):
            weight = self.weights.get(f"{name}.weight")
            if weight is not None:
                self._attach(module, weight, device)
                self._places[f"{name}.weight"] = _Place(weight, module.weight.shape[0], device)
            module._forward_impl = partial(
                _linear,
                module=module,
                place=self._places.get(f"{name}.weight"),
                scale=self.scale,
                rounds=rounds,
                group=groups.tensor,
            )
        self._start(seed)
        mine = base.fingerprint() if dist.get_rank(groups.world) == 0 else None
        self._fingerprint = all_gather_objects(mine)[0]
        self._made_from: object = None  # the values of A and B in the weights; None where these have changed since
        self._blank = True
        self._kept: dict[str, Tensor] = {}

    def is_whole(self, name: str) -> bool:
        """Return whether all tensor ranks hold the same of a parameter."""
        weight = self.weights[name.removesuffix(A).removesuffix(B) + "weight"]
        return name.endswith(A) == (weight.cut == "rows")

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's A and B, by name."""
        return {name: value for name, value in self._model.named_parameters() if is_adapter(name)}

    def copies(self) -> dict[str, Tensor]:
        """Return the values of A and B as they are now, on the host."""
        return {name: value.detach().cpu().clone() for name, value in self.parameters().items()}

    def changed(self) -> None:
        """Note that A and B are others than those that the weights are made from."""
        self._made_from = None

    def forget(self) -> None:
        """Note that all weights, also those without an adapter, have lost their values."""
        self._made_from, self._blank, self._kept = None, True, {}

    @torch.no_grad()
    def make(self, values: Mapping[str, Tensor] | None = None, *, keep_base: bool = False) -> None:
        """Make the weights from the model's own A and B, or from other `values`; nothing to do where they are.

        `keep_base` keeps W0 on a GPU for the next call, which drops it: two sets of weights then cost one upload.
        """
        made_from = _OWN if values is None else values
        if self._made_from is made_from:
            return
        values, kept, self._kept = values or self.parameters(), self._kept, {}
        for name, parameter in self._model.named_parameters():
            place = self._places.get(name)
            if place is not None:
                a, b = (values[f"{name.removesuffix('weight')}{which}"].to(parameter.device) for which in (A, B))
                whole = kept.get(name)
                if whole is None:
                    whole = self._base.read(name, parameter)
                if keep_base:
                    self._kept[name] = whole
                _add_(parameter, whole, place.spread(b).double(), a.double(), self.scale)
            elif self._blank and not is_adapter(name):
                self._base.fill(name, parameter)
        self._made_from, self._blank = made_from, False

    def export(self, out_dir: Path, model_dir: Path) -> None:
        """Write A and B as PEFT does. Collective; rank 0 writes."""
        shape, groups, rank = self._shape, self._groups, self.config.rank

        def layout(tensor_rank: int, pipeline_rank: int) -> dict[str, LocalParam]:
            weights = megatron_layout(shape, groups.tensor_size, groups.pipeline_size, tensor_rank, pipeline_rank)
            return by_parameter(adapter_layout(shape, rank, self.targets, weights))

        gathered = dict(gather_tensors(self.tensors, layout, groups, self.parameters()))
        if dist.get_rank(groups.world) == 0:
            out_dir.mkdir(parents=True, exist_ok=True)
            save_file(cast(dict[str, Tensor], gathered), out_dir / WEIGHTS, metadata={"format": "pt"})
            open_to_readers(out_dir / WEIGHTS)
            values = peft_config(self.config, self.targets, model_dir)
            (out_dir / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        dist.barrier(groups.world)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint of these adapters must have in common with them: settings and W0."""
        kind = self.config.model_dump(mode="json", include={"rank", "alpha", "use_rslora"})
        return {**kind, "target_modules": self.targets, "base": self._fingerprint}

    @torch.no_grad()
    def make_from_files(self, files: ModelFiles) -> None:
        """Put other weights in place of the model's own until the next `make`."""
        for name, parameter in self._model.named_parameters():
            if not is_adapter(name):
                files.fill(name, parameter)
        self.forget()

    def _attach(self, module: nn.Module, weight: AdaptedWeight, device: torch.device) -> None:
        for which, local in ((A, weight.a), (B, weight.b)):
            parameter = nn.Parameter(torch.zeros(local.shape, dtype=torch.float32, device=device))
            module.register_parameter(which, parameter)
            if (which == B) == (weight.cut == "rows"):
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0 if which == B else 1, 1)

    @torch.no_grad()
    def _start(self, seed: str) -> None:
        """Set this rank's share of A and B."""
        parameters, folder = self.parameters(), self.config.path
        given = None if folder is None else safe_open(folder / WEIGHTS, framework="pt")
        for name, local in self.layout.items():
            for piece in local.pieces:
                if given is not None:
                    values = given.get_slice(piece.tensor)[box_slices(piece.box)]
                elif name.endswith(A):
                    values = _drawn(self.tensors[piece.tensor], f"{seed} {piece.tensor}")[box_slices(piece.box)]
                else:
                    continue  # B is zero
                parameters[name][box_slices(piece.local)] = values


def _add_(weight_NK: Tensor, whole_NK: Tensor, b: Tensor, a: Tensor, scale: float) -> None:
    """Set a weight to W0 + scale B A, summed in float64: the rounded sum is then the same on every device and in every
    layout, but for about one of 10^12 elements in bfloat16.
    """
    rows = max(1, PIECE // whole_NK.shape[1])
    for start in range(0, whole_NK.shape[0], rows):
        part = slice(start, start + rows)
        weight_NK[part] = torch.addmm(whole_NK[part].double(), b[part], a, alpha=scale)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a model is of an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and ".layers." in f".{name}":
            yield name, module


def _drawn(size: tuple[int, ...], seed: str) -> Tensor:
    """Draw a whole A as PEFT does: uniform within 1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    bound = 1.0 / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


class _Place:
    """The rows of a weight that the rows of B belong to, and which part's A."""

    def __init__(self, weight: AdaptedWeight, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.num_parts = num_rows, weight.num_parts
        counts = [torch.arange(count) for _, _, count, _ in weight.rows]
        rows = [first + count for (_, first, _, _), count in zip(weight.rows, counts, strict=True)]
        parts = [torch.full_like(count, part) for (_, _, _, part), count in zip(weight.rows, counts, strict=True)]
        self.rows_N, self.parts_N = torch.cat(rows).to(device), torch.cat(parts).to(device)

    def spread(self, b_Nr: Tensor) -> Tensor:
        """Return B with a column for each row of A, [rows of the weight, n r]: zero where row and part do not meet."""
        spread = b_Nr.new_zeros((self.num_rows, self.num_parts, b_Nr.shape[1]))
        spread[self.rows_N, self.parts_N] = b_Nr
        return spread.flatten(1)

    def pick(self, spread: Tensor) -> Tensor:
        """Return the elements of such a matrix that are those of B, [N, r]."""
        return spread.unflatten(1, (self.num_parts, -1))[self.rows_N, self.parts_N]


def _linear(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    module: nn.Module,
    place: _Place | None,
    scale: float,
    rounds: bool,
    group: dist.ProcessGroup,
    **_: Any,
) -> Tensor:
    """Compute a product as Megatron-core's linear layer does: [T, 1, K] to [T, 1, N]."""
    adapter = None if place is None else (module.lora_A, module.lora_B)
    is_cut_by_columns = isinstance(module, RowParallelLinear)
    how = _How(place, scale, rounds, group, sequence_parallel, allreduce_dgrad, is_cut_by_columns)
    output = _Product.apply(input, weight, *(adapter or (None, None)), how)
    return output if bias is None else output + bias


class _How(NamedTuple):
    """The facts of a product besides its operands; `group`: the tensor ranks."""

    place: _Place | None
    scale: float
    rounds: bool
    group: dist.ProcessGroup
    gathers_tokens: bool
    adds_up_input_gradients: bool
    is_cut_by_columns: bool


class _Product(torch.autograd.Function):
    """x W^T with gradients of x, A and B. Keeps x as it comes, a share of the tokens where ranks share them out."""

    @staticmethod
    def forward(ctx, x_T1K, weight_NK, a, b, how):
        ctx.how = how
        if how.rounds:
            x_T1K, weight_NK = x_T1K.bfloat16(), weight_NK.bfloat16()
        ctx.save_for_backward(None if how.place is None else x_T1K, weight_NK, a, b)
        output = _all_tokens(x_T1K, how) @ weight_NK.t()
        return output.float() if how.rounds else output

    @staticmethod
    def backward(ctx, grad_T1N):
        how, (x_T1K, weight_NK, a, b) = ctx.how, ctx.saved_tensors
        grad_T1N = grad_T1N.to(weight_NK.dtype)
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_T1N @ weight_NK
            if how.gathers_tokens:
                grad_x = reduce_scatter_to_sequence_parallel_region(grad_x, group=how.group)
            elif how.adds_up_input_gradients:
                dist.all_reduce(grad_x, group=how.group)
            grad_x = grad_x.float() if how.rounds else grad_x
        if how.place is not None and any(ctx.needs_input_grad[2:4]):
            grad_a, grad_b = _adapter_gradients(
                _all_tokens(x_T1K, how).flatten(0, 1), grad_T1N.flatten(0, 1), a, b, how
            )
        return grad_x, None, grad_a, grad_b, None


def _adapter_gradients(x_TK: Tensor, grad_TN: Tensor, a: Tensor, b: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B in float32. What is whole on all tensor ranks gets the sum of theirs."""
    assert how.place is not None
    spread = how.place.spread(b.to(x_TK.dtype))
    grad_a = ((grad_TN @ spread).t() @ x_TK).float() * how.scale
    grad_b = how.place.pick(grad_TN.t() @ (x_TK @ a.to(x_TK.dtype).t())).float() * how.scale
    if how.group.size() > 1:
        dist.all_reduce(grad_b if how.is_cut_by_columns else grad_a, group=how.group)
    return grad_a, grad_b


def _all_tokens(x_T1K: Tensor, how: _How) -> Tensor:
    """Return the tokens of all tensor ranks, where each has a share."""
    return gather_from_sequence_parallel_region(x_T1K, group=how.group) if how.gathers_tokens else x_T1K
