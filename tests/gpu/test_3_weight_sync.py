"""Weights from the trainer's shards to a real engine on GPUs."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.conftest import Note
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf

SECONDS = 120
# GPUs: (trainer's tensor size, its pipeline size, the engine's tensor size).
LAYOUTS = [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (4, 2, 2, 2), (4, 2, 1, 4)]
DIMENSIONS: dict[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096,
    "num_hidden_layers": 8, "vocab_size": 32003,
}  # fmt: skip
CYCLES = 5


def gpu_engine(model_dir: str, tensor: int, load_weights: bool) -> Any:
    """An engine with room for a few short sequences."""
    from tango_hpc.models.engine.engine import RolloutEngine

    return RolloutEngine(
        Path(model_dir), tensor=tensor, dtype="bfloat16", max_model_len=256, max_num_seqs=8, max_batched_tokens=256,
        device="cuda", load_weights=load_weights, kv_cache_bytes=256 * 2**20, enforce_eager=True,
    )  # fmt: skip


def digests(engine: Any) -> dict[str, str]:
    """A digest of every live parameter."""
    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, parameter in engine.model.named_parameters()
    }


def loaded(model_dir: str, rollout_tensor: int) -> dict[str, str]:
    """What vLLM's own loader gives."""
    return digests(gpu_engine(model_dir, rollout_tensor, load_weights=True))


def synced(model_dir: str, tensor: int, pipeline: int, rollout_tensor: int) -> dict[str, Any]:
    """What weight syncs give, each after the engine has slept and forgotten; bytes and seconds."""
    from tango_hpc.base.config.schema import ReshardConfig
    from tango_hpc.models.weight_sync.sync import WeightSync

    policy = policy_of(model_dir, tensor, pipeline, dtype="bfloat16")
    policy.offload()
    engine = gpu_engine(model_dir, rollout_tensor, load_weights=False)
    engine.sleep()
    policy.onload(weights_only=True)
    engine.wake(weights_only=True)
    sync = WeightSync(policy, engine, ReshardConfig(verify="always"))
    seconds, stats, switch, plain = [], None, [], []
    for _ in range(CYCLES):
        start = time.perf_counter()
        engine.sleep()
        policy.offload(weights_changed=False)
        policy.onload(weights_only=True)
        engine.wake(weights_only=True)
        torch.cuda.synchronize()
        switch.append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        stats = sync.sync()
        seconds.append(time.perf_counter() - start)
    sync.config = ReshardConfig(verify="never")
    for _ in range(CYCLES):
        dist.barrier()
        start = time.perf_counter()
        sync.sync()
        plain.append(time.perf_counter() - start)
    assert stats is not None
    return {
        "digests": digests(engine), "sent": stats.bytes_sent, "local": stats.bytes_local,
        "minimum": stats.bytes_minimum, "seconds": sorted(seconds)[CYCLES // 2], "switch": sorted(switch)[CYCLES // 2],
        "plain": sorted(plain)[CYCLES // 2],
    }  # fmt: skip


@pytest.mark.parametrize(("gpus", "tensor", "pipeline", "rollout_tensor"), LAYOUTS)
def test_weight_sync(
    gpu: torch.device,
    gpus: int,
    tensor: int,
    pipeline: int,
    rollout_tensor: int,
    vllm: None,
    note: Note,
    tmp_path: Path,
) -> None:
    """Part 3: after sleeping empty, an engine has what vLLM's own loader would give it, at the minimum of bytes."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, here {torch.cuda.device_count()}")
    model_dir = str(make_tiny_hf(tmp_path / "model", **DIMENSIONS))
    expected = run_ranks(loaded, gpus, model_dir, rollout_tensor, timeout=280)
    found = run_ranks(synced, gpus, model_dir, tensor, pipeline, rollout_tensor, timeout=280)
    for rank, (whole, shards) in enumerate(zip(expected, found, strict=True)):
        assert shards["digests"] == whole, f"rank {rank}"
    sync = found[0]
    assert sync["sent"] == sync["minimum"]
    note("bytes sent over the minimum", 1.0 if sync["sent"] == sync["minimum"] else 0.0, "", "1")
    note("a sync with its checksums", 1000 * sync["seconds"], "ms")
    note("the same without checksums", 1000 * sync["plain"], "ms")
    note("moved without checksums", (sync["sent"] + sync["local"]) / sync["plain"] / 1e9, "GB/s, all GPUs together")
    note("sleep, offload, onload, wake", 1000 * sync["switch"], "ms")
