"""`tango export` and `tango import`: between a run's checkpoints, Hugging Face folders and the hub. One process, on the
CPU.

Exporting reads a checkpoint that any layout wrote; importing makes a folder that training can read: safetensors of
one type whose tensors fit config.json, with the tokenizer and its chat template.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tango_hpc.base.config import load_config
from tango_hpc.base.config.paths import absolute
from tango_hpc.base.errors import UserError
from tango_hpc.base.prompts import FIELDS
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.manifest import find_damage
from tango_hpc.base.run.weights_alone import is_for_readers
from tango_hpc.models.layout.adapter_layout import peft_names
from tango_hpc.questions.data.prepare.sources import download
from tango_hpc.stages.eval_inputs import training_checkpoints
from tango_hpc.stages.model_folder import check_files, check_known, prompt_problems

if TYPE_CHECKING:
    import torch

ROLES = ("generator", "verifier")


def export_run(run: Path, role: str, out: Path, step: int | None = None, *, adapter: bool = False) -> str:
    """Write the weights of `role` after optimizer step `step` (default: the last saved) as a Hugging Face folder; with
    `adapter` its adapter alone, as PEFT does.

    Its chat template is that of the role's training. Returns what was written. Raises `UserError` for a run without
    that role, adapter or checkpoint, or an `out` that exists.
    """
    if role not in ROLES:
        raise UserError(f"--role {role!r}: choose generator or verifier")
    config = load_config(RunDirectory.open(run).config)
    if role not in config.roles:
        raise UserError(f"{run} has no {role}: it was trained without one")
    checkpoints = training_checkpoints(run)
    if not checkpoints:
        raise UserError(f"{run} has no training checkpoints yet")
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(checkpoints)))}")
    model = config.model_of(role)
    weights = checkpoints[chosen] / model
    if not weights.is_dir():
        raise UserError(
            f"the {role} of {run} was not trained; its weights are those of {config.roles[role].model.path}"
        )
    damage = find_damage(checkpoints[chosen], lambda name: name.startswith(f"{model}/") and is_for_readers(name))
    if damage is not None:
        others = ", ".join(str(other) for other in sorted(checkpoints) if other != chosen) or "none"
        raise UserError(
            f"the checkpoint {checkpoints[chosen]} is damaged: {damage}. Choose another with --step; there are:"
            f" {others}"
        )
    out = absolute(out)
    _refuse_existing(out)
    settings = config.roles[role]
    if adapter and settings.adapter is None:
        raise UserError(f"the {role} of {run} was trained without an adapter; leave out --adapter")
    check_files(settings.model.path)
    with _one_rank():
        from tango_hpc.base.config.roles import ParallelConfig
        from tango_hpc.models.trainer.policy import Policy

        policy = Policy(settings.model_copy(update={"parallel": ParallelConfig()}), config.launch.dtype)
        policy.load(weights)
        with _whole_folder(out) as partial:
            if adapter:
                policy.export_adapter(partial)
            else:
                policy.export_hf(partial)
                _write_chat_template(partial, settings.chat_template)
    what = f"the {role} after {chosen} steps of {run}"
    if not adapter:
        return f"{what} is in {out}"
    return (
        f"the adapter of {what} is in {out}\nTraining rounded the sum of weight and adapter to {config.launch.dtype};"
        " PEFT and vLLM keep the two apart, and their log-probabilities differ a little (docs/adapters.md)"
    )


def import_model(source: str, out: Path, dtype: str = "bfloat16", adapter: Path | None = None) -> str:
    """Write the model of `source`, a Hugging Face folder or hub id, to `out` as safetensors of `dtype`, with the
    `adapter` of a PEFT folder added to it.

    Older folders with `pytorch_model*.bin` are read as well. Tensors are converted one at a time; what the family
    does not have, or has in another size, is refused by name.
    """
    out = absolute(out)
    _refuse_existing(out)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = download(source, "model", lambda: _wanted_files(source))
    check_known(folder)
    notes = [note for role in FIELDS for note in prompt_problems(folder, role)]  # a config may name another template
    import torch

    from tango_hpc.base.model_shape import ModelShape, hf_tensors
    from tango_hpc.models.trainer import hf_io

    config = hf_io.read_config(folder)
    shape = ModelShape.from_hf_config(config)
    added = (lambda name, tensor: tensor) if adapter is None else _adding(absolute(adapter), shape)
    target: torch.dtype = getattr(torch, dtype)
    with _whole_folder(out) as partial:
        hf_io.copy_side_files(folder, partial, target)
        writer = hf_io.ShardWriter(partial, hf_io.SHARD_BYTES)
        expected = hf_tensors(shape)
        for name, tensor in _tensors(folder, shape, expected):
            writer.add(name, added(name, tensor).to(target).contiguous())
        writer.close()
        check_files(partial)
    millions = sum(math.prod(size) for size in expected.values()) / 1e6
    return "\n".join([f"{config['model_type']}, {millions:,.1f}M parameters, {dtype}, is in {out}", *notes])


def _adding(folder: Path, shape: Any) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return the function that adds the adapter in `folder` to a tensor, in float64 as the trainer does."""
    from safetensors import safe_open

    from tango_hpc.models.layout.peft_folder import WEIGHTS, adapter_in, check_peft_folder

    adapter = adapter_in(folder)
    check_peft_folder(adapter, shape)
    handle = safe_open(folder / WEIGHTS, framework="pt")
    adapted = set(handle.keys())

    def add(name: str, tensor: torch.Tensor) -> torch.Tensor:
        a, b = peft_names(name)
        if a not in adapted:
            return tensor
        factors = (handle.get_tensor(b).double(), handle.get_tensor(a).double())
        return tensor.double().addmm(*factors, alpha=adapter.scale)

    return add


def _write_chat_template(folder: Path, chosen: str) -> None:
    """Leave in an exported folder the chat template that the role was trained with: its model's own, a file's,
    or none.
    """
    if chosen == "auto":
        return
    template, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    template.unlink(missing_ok=True)
    if settings.is_file():
        values = json.loads(settings.read_text())
        if values.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    if chosen != "none":
        shutil.copyfile(chosen, template)


def _tensors(folder: Path, shape: Any, expected: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the model, one at a time, in the order of `expected`."""
    from safetensors import safe_open

    from tango_hpc.models.trainer import hf_io

    if any(folder.glob("*.safetensors")):
        for name, file in hf_io.check_checkpoint(folder, shape).items():
            with safe_open(file, framework="pt") as handle:
                yield name, handle.get_tensor(name)
        return
    import torch

    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not pickles:
        raise UserError(f"{folder} has no weights: neither *.safetensors nor pytorch_model*.bin")
    found: dict[str, torch.Tensor] = {}
    for file in pickles:
        try:
            found.update(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        except Exception as error:  # of zipfile, pickle or torch, by where it is damaged
            raise UserError(f"{file} is damaged, or was not downloaded whole; get it again: {error}") from None
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{name} is {list(found[name].shape)}, should be {list(size)}"
        for name, size in expected.items()
        if name in found and tuple(found[name].shape) != size
    ]
    if problems:
        raise UserError(f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}")
    for name in expected:
        yield name, found[name]


def _wanted_files(source: str) -> list[str]:
    """Return patterns of the files of a hub model that training reads: safetensors where the model has them."""
    from huggingface_hub import list_repo_files

    has_safetensors = any(name.endswith(".safetensors") for name in list_repo_files(source))
    return ["*.json", "*.model", "*.txt", "*.jinja", "*.safetensors" if has_safetensors else "pytorch_model*.bin"]


def _refuse_existing(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not empty; choose another --out")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Make a folder beside `out` that becomes `out` when all is written, and goes if anything fails."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _one_rank() -> Iterator[None]:
    """Make this process a world of one, on the CPU: the weights of any trained model fit there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed

    init_distributed()
    try:
        yield
    finally:
        shutdown_distributed()
