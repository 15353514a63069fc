"""Prints what each way to compute activations again does to the real model, for test_plan.py: bytes that are kept for
the backward pass, bytes that an update takes, and how far gradients are off. A program of its own: it joins a process
group."""

from __future__ import annotations

import json
import os
import tempfile

import torch

from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed
from tests.helpers.activations import kept_bytes, peak_bytes
from tests.helpers.policies import policy_of
from tests.helpers.tiny import make_tiny_hf, tiny_hf_config

DIMS = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 64}
TOKENS = 256
WAYS = ("none", "selective", "full")


def measure(folder: str, family: str, dtype: str) -> dict[str, dict[str, float]]:
    """By way: `kept` and `peak` bytes of one sequence, and `off`, the largest error of a gradient over its largest
    value.
    """
    make_tiny_hf(folder, family, **DIMS)
    found: dict[str, dict[str, float]] = {}
    exact: dict[str, torch.Tensor] = {}
    for way in WAYS:
        policy = policy_of(
            folder, dtype=dtype, micro_batch_tokens=4096, optimizer=OptimizerConfig(clip_grad_norm=1e9), total_steps=2,
            recompute=way,
        )  # fmt: skip
        kept = kept_bytes(policy, TOKENS)
        gradients = {name: parameter.main_grad.clone() for name, parameter in policy.model.named_parameters()}
        exact = exact or gradients
        off = max(
            float((gradient - exact[name]).abs().max() / exact[name].abs().max())
            for name, gradient in gradients.items()
        )
        found[way] = {"kept": kept, "peak": peak_bytes(policy, TOKENS), "off": off}
    return found


def main() -> None:
    """Qwen2 in fp32, whose bytes the plan is held against; Qwen3, which has norms of heads, in bf16."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    init_distributed()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        found = {"float32": measure(first, "qwen2", "float32"), "bfloat16": measure(second, "qwen3", "bfloat16")}
    print(json.dumps({"config": tiny_hf_config(**DIMS), "tokens": TOKENS, **found}))
    shutdown_distributed()


if __name__ == "__main__":
    main()
