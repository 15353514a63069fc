"""The folder of an adapter as PEFT writes and reads it: adapter_config.json beside adapter_model.safetensors.

Imports no torch: it runs on login nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def check_peft_folder(adapter: AdapterConfig, shape: ModelShape) -> None:
    """Raise UserError with all that keeps the folder `adapter.path` from being the start of `adapter`."""
    assert adapter.path is not None
    folder = adapter.path
    lacking = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        raise UserError(f"no adapter in {folder}: it lacks {' and '.join(lacking)}")
    given = json_object((folder / CONFIG).read_bytes())
    if given is None:
        raise UserError(f"{folder / CONFIG} is not valid JSON")
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
        problems += _tensor_problems(folder / WEIGHTS, adapter, shape)
    if problems:
        raise UserError(f"the adapter in {folder} cannot be used: {'; '.join(problems)}")


def _tensor_problems(file: Path, adapter: AdapterConfig, shape: ModelShape) -> list[str]:
    """Return how the tensors of a file differ from those of the adapter."""
    with file.open("rb") as stream:
        header = json_object(stream.read(int.from_bytes(stream.read(8), "little") % 2**27))
    if header is None:
        return [f"{file.name} cannot be read as safetensors"]
    found = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    expected = peft_tensors(shape, adapter.rank, adapter_targets(shape, adapter.target_modules))
    modules = list(dict.fromkeys(name.split(".")[-3] for name in found))
    if {name.split(".")[-3] for name in expected} != set(modules):
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
