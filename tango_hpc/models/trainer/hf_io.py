"""Hugging Face checkpoints in and out of any layout, a slice or a tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tango_hpc.base.config.models import SEED_FILE
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import open_to_readers
from tango_hpc.base.model_shape import ModelShape, hf_tensors, indexed_files
from tango_hpc.base.run.fingerprint import checksum
from tango_hpc.models.layout.trainer_layout import Box, LocalParam, megatron_layout
from tango_hpc.models.parallel.groups import PolicyGroups

# Files of a model folder that do not go along with exported weights.
_LEFT_BEHIND = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", SEED_FILE)
# A safetensors file of an export is closed when it has grown past this.
SHARD_BYTES = 4 * 2**30
# Tensors that some checkpoints carry and no model needs.
_IGNORED = ("rotary_emb.inv_freq",)
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return `config.json` of a model folder."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise UserError(f"{model_dir} is not a model folder: it has no config.json")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def check_checkpoint(model_dir: Path, shape: ModelShape) -> dict[str, Path]:
    """Return file of each tensor of the checkpoint; UserError naming all that are missing, extra or misshapen."""
    files = _checkpoint_files(model_dir)
    expected = hf_tensors(shape)
    found: dict[str, Path] = {}
    problems = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (no mapping)
                    found[name] = path
                    size = tuple(handle.get_slice(name).get_shape())
                    if name in expected and size != expected[name]:
                        problems.append(f"{name} is {list(size)}, should be {list(expected[name])}")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from None
    if shape.tied:
        found.pop("lm_head.weight", None)  # some checkpoints store the tied copy too
    problems += [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{name} is not part of the model" for name in found if name not in expected and not name.endswith(_IGNORED)
    ]
    if problems:
        raise UserError(f"the weights in {model_dir} do not fit its config.json: " + "; ".join(problems))
    return {name: found[name] for name in expected}


def _checkpoint_files(model_dir: Path) -> list[Path]:
    """Return safetensors files of a folder, those of the index if it has one."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        files = [model_dir / name for name in indexed_files(index)]
        if missing := [path.name for path in files if not path.is_file()]:
            raise UserError(f"{index} names files that are not there: {', '.join(missing)}")
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise UserError(f"{model_dir} has no safetensors weights")
    return files


class ModelFiles:
    """The weights of a model folder, mapped into memory: all processes of a node that read them share one copy.

    `layout`: the place of each tensor in this rank's parameters.
    """

    def __init__(self, model_dir: Path, shape: ModelShape, groups: PolicyGroups) -> None:
        self._files = check_checkpoint(model_dir, shape)
        self._handles = {path: safe_open(path, framework="pt") for path in set(self._files.values())}
        self.layout = rank_layout(shape, groups)

    def fingerprint(self) -> dict[str, str]:
        """Return size and checksum of each file, by its name."""
        sizes = {path: path.stat().st_size for path in sorted(self._handles)}
        return {path.name: f"{size} bytes, checksum {checksum(path, size):08x}" for path, size in sizes.items()}

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor) -> None:
        """Read this rank's slices of one parameter; vocabulary padding becomes zeros."""
        local = self.layout[name]
        assert tuple(parameter.shape) == local.shape, f"{name}: {tuple(parameter.shape)}, not {local.shape}"
        if sum(piece.num_elements for piece in local.pieces) < parameter.numel():
            parameter.zero_()
        for piece in local.pieces:
            source = self._handles[self._files[piece.tensor]].get_slice(piece.tensor)[box_slices(piece.box)]
            parameter[box_slices(piece.local)].copy_(source)

    def read(self, name: str, like: Tensor) -> Tensor:
        """Return the values of one parameter where `like` is, in the precision of the files."""
        first = self.layout[name].pieces[0].tensor
        dtype = _DTYPES[self._handles[self._files[first]].get_slice(first).get_dtype()]
        values = torch.empty(self.layout[name].shape, dtype=dtype, device=like.device)
        self.fill(name, values)
        return values


def import_weights(model_dir: Path, shape: ModelShape, groups: PolicyGroups, params: Mapping[str, Tensor]) -> None:
    """Fill this rank's parameters, reading only its own slices."""
    files = ModelFiles(model_dir, shape, groups)
    assert files.layout.keys() == params.keys(), f"layout and model differ in {files.layout.keys() ^ params.keys()}"
    for name, parameter in params.items():
        files.fill(name, parameter)


def rank_layout(shape: ModelShape, groups: PolicyGroups) -> dict[str, LocalParam]:
    """Return the layout of this rank's parameters."""
    return megatron_layout(shape, groups.tensor_size, groups.pipeline_size, groups.tensor_rank, groups.pipeline_rank)


@torch.no_grad()
def export_weights(
    out_dir: Path,
    shape: ModelShape,
    groups: PolicyGroups,
    params: Mapping[str, Tensor],
    *,
    model_dir: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights as sharded safetensors with index, and copy the other files of `model_dir`.

    Rank 0 writes; it never holds more than one file's tensors. Every rank must call this.
    """
    rank = dist.get_rank(groups.world)
    writer = ShardWriter(out_dir, shard_bytes) if rank == 0 else None
    if writer is not None:
        copy_side_files(model_dir, out_dir, next(iter(params.values())).dtype)
        _leave_sampling_out(out_dir / "generation_config.json")
    layout = partial(megatron_layout, shape, groups.tensor_size, groups.pipeline_size)
    for name, tensor in gather_tensors(hf_tensors(shape), layout, groups, params):
        if writer is not None:
            assert tensor is not None
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
    dist.barrier(groups.world)


def copy_side_files(model_dir: Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Copy all but the weights (config, tokenizer, chat template); `config.json` then names `dtype`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in model_dir.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _LEFT_BEHIND):
            shutil.copyfile(path, out_dir / path.name)
    config_path = out_dir / "config.json"
    config = json.loads(config_path.read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _leave_sampling_out(file: Path) -> None:
    """Keep of a generation_config.json the special tokens alone: the temperature, penalties and limits in it are those
    of the model that training began with, and none of them was used in training or evaluation.
    """
    if file.is_file():
        values = json.loads(file.read_text())
        kept = {
            key: value for key, value in values.items() if key.endswith("_token_id") or key == "transformers_version"
        }
        file.write_text(json.dumps(kept, indent=2) + "\n")


def gather_tensors(
    tensors: Mapping[str, tuple[int, ...]],
    layout: Callable[[int, int], Mapping[str, LocalParam]],
    groups: PolicyGroups,
    params: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each full tensor of a file, one at a time, on the CPU of global rank 0; None elsewhere.

    `layout` gives the parameters of a (tensor rank, pipeline rank). Of the ranks that hold an element, the first sends
    it.
    """
    rank = dist.get_rank(groups.world)
    dtype = next(iter(params.values())).dtype
    owners = _owners(tensors, layout, groups)
    for name, size in tensors.items():
        full = torch.empty(size, dtype=dtype) if rank == 0 else None
        for source, local_name, box, local in owners[name]:
            if source == rank:
                values = params[local_name][box_slices(local)].detach().cpu().contiguous()
                if full is None:
                    dist.send(values, 0, group=groups.world)
                else:
                    full[box_slices(box)] = values
            elif full is not None:
                values = torch.empty([stop - start for start, stop in box], dtype=dtype)
                dist.recv(values, source, group=groups.world)
                full[box_slices(box)] = values
        yield name, full


def _owners(
    tensors: Mapping[str, tuple[int, ...]],
    layout: Callable[[int, int], Mapping[str, LocalParam]],
    groups: PolicyGroups,
) -> dict[str, list[tuple[int, str, Box, Box]]]:
    """Return for each tensor the boxes and their senders: (global rank, local parameter, box, box in the parameter)."""
    owners: dict[str, list[tuple[int, str, Box, Box]]] = {name: [] for name in tensors}
    taken: set[tuple[str, Box]] = set()
    for pipeline_rank in range(groups.pipeline_size):
        for tensor_rank in range(groups.tensor_size):
            rank = tensor_rank + groups.tensor_size * groups.data_size * pipeline_rank
            for local_name, param in layout(tensor_rank, pipeline_rank).items():
                for piece in param.pieces:
                    if (piece.tensor, piece.box) not in taken:
                        taken.add((piece.tensor, piece.box))
                        owners[piece.tensor].append((rank, local_name, piece.box, piece.local))
    return owners


def box_slices(box: Box) -> tuple[slice, ...]:
    """Return the slices of a box."""
    return tuple(slice(start, stop) for start, stop in box)


class ShardWriter:
    """Collects tensors into files of about `shard_bytes`, named as Hugging Face does."""

    def __init__(self, out_dir: Path, shard_bytes: int) -> None:
        self.out_dir, self.shard_bytes = out_dir, shard_bytes
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.shard_bytes:
            self._flush()
        self.pending[name] = tensor
        self.pending_bytes += size
        self.total_bytes += size

    def close(self) -> None:
        """Write the last file, give all their final names, and write the index."""
        self._flush()
        count = len(self.files)
        weight_map = {}
        for number, names in enumerate(self.files, start=1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.out_dir / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        self.files.append(list(self.pending))
        part = self._part(len(self.files))
        save_file(self.pending, part, metadata={"format": "pt"})
        open_to_readers(part)
        self.pending, self.pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.out_dir / f"model-{number:05d}.safetensors.partial"
