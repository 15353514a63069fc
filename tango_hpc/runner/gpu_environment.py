"""The variables of a rank on a GPU for NCCL and PyTorch's allocator, set before either is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

NVLS = "NCCL_NVLS_ENABLE"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*True\s*(?=,|$)")
_WHY = "vLLM's custom all-reduce would end the process when it captures CUDA graphs"


def prepare_gpu_environment(env: MutableMapping[str, str] = os.environ) -> list[str]:
    """Switch NCCL's multicast off where `env` does not say otherwise, and PyTorch's expandable segments.

    Return a line for the log for each variable that was set and is now another.
    """
    env.setdefault(NVLS, "0")
    lines = []
    for name, kept in _without_expandable_segments(env).items():
        if kept:
            env[name] = kept
        else:
            del env[name]
        lines.append(f"tango: expandable_segments:True is taken out of {name} (now {kept or 'unset'}): {_WHY}")
    return lines


def allocator_notes(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what `tango doctor` says of each variable that `prepare_gpu_environment` would change, and the way out."""
    return [
        (f"{name} has expandable_segments:True: {_WHY}", "ranks on GPUs run without this field; nothing to do")
        for name in _without_expandable_segments(env)
    ]


def _without_expandable_segments(env: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator variables of `env` that switch expandable segments on, without that field."""
    return {
        name: _EXPANDABLE.sub("", env[name]).strip(", ")
        for name in ALLOCATOR_VARIABLES
        if _EXPANDABLE.search(env.get(name, ""))
    }
