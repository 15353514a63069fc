"""The trainer on a GPU against the same on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tango_hpc.base.config.roles import AdapterConfig, OptimizerConfig
from tango_hpc.base.families import Scales
from tests.gpu.conftest import Note
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

SECONDS = 60
LENGTHS = [4096, 1500, 333, 64, 17, 2, 1]
REHEARSED_LENGTHS = [512, 200, 64, 17, 2, 1]  # a CPU without bfloat16 would take minutes
# By precision: the largest mean difference of a log-probability, and of the gradient's norm as a share.
LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.03, 0.05)}
# A step that 16-bit weights can take (log-probabilities move by 0.54) and that small gradients' signs do not decide.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, epsilon=1e-3)


def train_a_little(model_dir: str, dtype: str, recompute: Any, adapter: Any = None) -> dict[str, Any]:
    """Log-probabilities, one update, and log-probabilities after it."""
    from tango_hpc.models.trainer.loss import LossSettings

    torch.backends.cuda.matmul.allow_tf32 = False
    policy = policy_of(
        model_dir, dtype=dtype, optimizer=OPTIMIZER, total_steps=2, recompute=recompute, adapter=adapter,
        with_reference=adapter is not None,
    )  # fmt: skip
    if adapter is not None:
        add_noise(policy)
    sequences = random_sequences(24, 107)
    before = np.concatenate(policy.logprobs(sequences))
    loss = LossSettings(kl_coef=0.0 if adapter is None else 0.1)
    policy.prepare(sequences, loss)
    stats = policy.update(sequences, loss)
    policy.offload()
    policy.onload()
    after = np.concatenate(policy.logprobs(sequences))
    return {"before": before, "after": after, "grad_norm": stats.grad_norm, "device": str(policy.device)}


def compare(found: dict[str, Any], expected: dict[str, Any], dtype: str, note: Note) -> None:
    """Note and limit the differences of log-probabilities and of the gradient's norm."""
    limit, norm_limit = LIMITS[dtype]
    for when in ("before", "after"):
        gap = float(np.abs(found[when] - expected[when]).mean())
        note(f"log-probability, {when}: mean difference", gap, "nats", f"at most {limit:g}")
        assert gap <= limit
    share = abs(found["grad_norm"] / expected["grad_norm"] - 1)
    note("gradient's norm differs by", share, "", f"at most {norm_limit:g}")
    assert share <= norm_limit


@torch.no_grad()
def add_noise(policy: Any) -> None:
    """Give A and B values that count, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    for value in policy.adapters.parameters().values():
        value.copy_(torch.randn(value.shape, generator=generator) * 0.05)
    policy.adapters.changed()


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and what its trainer finds on the CPU in fp32."""
    model_dir = make_tiny_hf(tmp_path_factory.mktemp("exact") / "model", hidden_size=256, num_attention_heads=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
        found = run_ranks(train_a_little, 1, str(model_dir), "float32", "none")[0]
    assert found["device"] == "cpu"
    return model_dir, found


@pytest.mark.parametrize(
    ("dtype", "recompute"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "selective"), ("bfloat16", "full")]
)
def test_logprobs_and_one_update(
    device: torch.device, exact: tuple[Path, dict[str, Any]], dtype: str, recompute: str, note: Note
) -> None:
    """Part 1: log-probabilities, a gradient and an update are the CPU's in fp32."""
    model_dir, expected = exact
    found = run_ranks(train_a_little, 1, str(model_dir), dtype, recompute)[0]
    assert found["device"].startswith(device.type)
    compare(found, expected, dtype, note)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_and_come_back_from_the_host(
    device: torch.device, exact: tuple[Path, dict[str, Any]], dtype: str, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part 1: with adapters and a reference, log-probabilities and an update are the CPU's in fp32."""
    model_dir, adapter = exact[0], AdapterConfig(rank=8, alpha=16)
    found = run_ranks(train_a_little, 1, str(model_dir), dtype, "selective", adapter)[0]
    assert found["device"].startswith(device.type)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    expected = run_ranks(train_a_little, 1, str(model_dir), "float32", "none", adapter)[0]
    compare(found, expected, dtype, note)
    assert np.abs(expected["after"] - expected["before"]).mean() > 10 * LIMITS["float32"][0]


def attention_errors(device_type: str, heads: int, groups: int, dim: int, window: int | None) -> dict[str, float]:
    """Relative errors of packed attention in bf16 against padded attention in fp32: of its output and its gradients."""
    from tango_hpc.models.trainer.attention import PackedCoreAttention, PackedSequences  # may start CUDA: not in pytest
    from tango_hpc.models.trainer.rotary import LayerPositions, Rotary

    torch.manual_seed(0)
    device = torch.device(device_type)
    lengths = LENGTHS if device_type == "cuda" else REHEARSED_LENGTHS
    scale = None if window is None else 0.7 * dim**-0.5
    settings = SimpleNamespace(positions=[LayerPositions(window)], scales=Scales(attention=scale))
    frequencies = 10_000.0 ** -(torch.arange(dim // 2) / (dim // 2))
    inputs = [torch.randn(sum(lengths), n, dim, device=device) for n in (heads, groups, groups)]
    weights = torch.randn(sum(lengths), heads, dim, device=device)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        # In fp32 scores are kept, and all of them padded to the longest would take 45 GB.
        blocks = [lengths] if dtype == torch.bfloat16 else [lengths[:1], lengths[1:2], lengths[2:]]
        tensors = [tensor.to(torch.bfloat16).to(dtype).requires_grad_() for tensor in inputs]
        pieces = zip(*(tensor.split([sum(block) for block in blocks]) for tensor in tensors), strict=True)
        attended = [
            PackedCoreAttention(settings, 1)(
                *piece, packed_seq_params=PackedSequences.of_lengths(block, [Rotary(frequencies)], dtype, device)
            ).view(-1, heads, dim)
            for block, piece in zip(blocks, pieces, strict=True)
        ]
        output = torch.cat(attended)
        gradients = torch.autograd.grad((output * weights.to(torch.bfloat16).to(dtype)).sum(), tensors)
        return [output.detach(), *gradients]

    pairs = zip(("output", "dQ", "dK", "dV"), run(torch.float32), run(torch.bfloat16), strict=True)
    return {name: float((found.float() - exact).norm() / exact.norm()) for name, exact, found in pairs}


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "window"), [(14, 2, 64, None), (28, 4, 128, None), (32, 8, 128, None), (32, 8, 128, 300)]
)
def test_packed_attention(
    device: torch.device, heads: int, groups: int, dim: int, window: int | None, note: Note
) -> None:
    """Part 1: packed attention in bf16 is padded attention in fp32, forward and backward; with a window too."""
    for name, error in run_ranks(attention_errors, 1, device.type, heads, groups, dim, window)[0].items():
        note(f"{name}: relative error", error, "", "at most 0.02")
        assert error <= 0.02
