"""The folder of an adapter as PEFT writes and reads it: adapter_config.json beside adapter_model.safetensors.

Imports no torch: it runs on login nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tango_hpc.base.config.roles import AdapterConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import json_object
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.models.layout.adapter_layout import adapter_targets, peft_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings of PEFT that the trainer does not have, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "lora_dropout": (0, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
# Starts that change the weights of the model too, so that B A alone is not the difference.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def adapter_in(folder: Path) -> AdapterConfig:
    """Return the settings of the adapter in `folder`. Raises UserError where there is none, or of another kind."""
    given, found = _read(folder)
    try:
        return AdapterConfig(
            rank=given["r"],
            alpha=given["lora_alpha"],
            use_rslora=bool(given.get("use_rslora")),
            target_modules=tuple(_modules(found)),
            path=folder,
        )
    except (KeyError, ValidationError) as error:
        raise UserError(f"{folder / CONFIG} is no configuration of LoRA: {error}") from None


def check_peft_folder(adapter: AdapterConfig, shape: ModelShape) -> None:
    """Raise UserError with all that keeps the folder `adapter.path` from being the start of `adapter`."""
    assert adapter.path is not None
    folder = adapter.path
    given, found = _read(folder)
    problems = [
        f"{key} {json.dumps(given[key])} is not supported"
        for key, nothing in _REFUSED.items()
        if given.get(key) not in nothing
    ]
    if given.get("peft_type") != "LORA":
        problems.insert(0, f"peft_type {given.get('peft_type')!r} is not supported, LORA is")
    if given.get("init_lora_weights", True) not in _STARTS:
        problems.append(f"init_lora_weights {given['init_lora_weights']!r} changes the model's own weights")
    for key, name, ours in (
        ("r", "rank", adapter.rank),
        ("lora_alpha", "alpha", adapter.alpha),
        ("use_rslora", "use_rslora", adapter.use_rslora),
    ):
        theirs = given.get(key, False)
        if theirs != ours:
            problems.append(f"its {key} is {theirs}; set adapter.{name} to that")
    if not problems:
        problems += _tensor_problems(found, adapter, shape)
    if problems:
        raise UserError(f"the adapter in {folder} cannot be used: {'; '.join(problems)}")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return a folder's configuration, and the shapes of its tensors."""
    lacking = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        raise UserError(f"no adapter in {folder}: it lacks {' and '.join(lacking)}")
    given = json_object((folder / CONFIG).read_bytes())
    if given is None:
        raise UserError(f"{folder / CONFIG} is not valid JSON")
    with (folder / WEIGHTS).open("rb") as stream:
        header = json_object(stream.read(int.from_bytes(stream.read(8), "little") % 2**27))
    if header is None:
        raise UserError(f"{folder / WEIGHTS} cannot be read as safetensors")
    return given, {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _modules(tensors: Iterable[str]) -> list[str]:
    """Return the linear layers that the tensors of an adapter are for."""
    return list(dict.fromkeys(name.split(".")[-3] for name in tensors if name.count(".") > 2))


def _tensor_problems(found: dict[str, tuple[int, ...]], adapter: AdapterConfig, shape: ModelShape) -> list[str]:
    """Return how the tensors of a file differ from those of the adapter."""
    expected = peft_tensors(shape, adapter.rank, adapter_targets(shape, adapter.target_modules))
    modules = _modules(found)
    if set(_modules(expected)) != set(modules):
        return [f"it has {', '.join(modules)}; set adapter.target_modules to [{', '.join(modules)}]"]
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return [
        f"{name} is {_size(found.get(name))} in it, and the model needs {_size(expected.get(name))}"
        for name in wrong[:3]
    ]


def _size(size: tuple[int, ...] | None) -> str:
    return "missing" if size is None else "x".join(map(str, size))


def peft_config(adapter: AdapterConfig, targets: list[str], base: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json, which PEFT and vLLM read."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "use_rslora": adapter.use_rslora,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
