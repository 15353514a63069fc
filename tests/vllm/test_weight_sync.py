"""Weights go from trainer shards to engine shards, bit for bit, in every layout.

What the engine should hold is taken from a second engine, into which vLLM's own loader reads the checkpoint that the
policy exports. Both engines are read through the kernels that they compute with.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tango_hpc.config.schema import ReshardConfig
from tango_hpc.parallel.collectives import broadcast_object
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf
from tests.helpers.vllm_engines import make_engine, make_policy

FAMILIES = ("qwen2", "qwen3", "llama")
TRAINING = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
TINY_BUCKET = ReshardConfig(bucket_mb=0.004, verify="always", timeout_seconds=30)


def shared_folder() -> Path:
    """One folder for all ranks; the helper that starts them removes nothing, the test run's tmp does."""
    return Path(broadcast_object(tempfile.mkdtemp(prefix="weight-sync-")))


def loaded_copies(engine) -> dict[str, list[torch.Tensor]]:
    from tango_hpc.rollout.weights import EngineWeights

    weights = EngineWeights(engine.model)
    return {name: [copy.clone() for copy in weights.copies(name)] for name in weights.shapes()}


def differing_tensors(engine, expected: dict[str, list[torch.Tensor]]) -> list[str]:
    installed = loaded_copies(engine)
    assert installed.keys() == expected.keys()
    return [
        name
        for name, copies in expected.items()
        if len(copies) != len(installed[name])
        or not all(torch.equal(a, b) for a, b in zip(copies, installed[name], strict=True))
    ]


@torch.no_grad()
def scale_weights(policy) -> None:
    for shard in policy.named_shards().values():
        shard.mul_(1.25)


def checkpoints(folder: Path, family: str) -> tuple[Path, Path]:
    """A tiny checkpoint, and what a policy with scaled weights exports; collective."""
    start, scaled = folder / family, folder / f"{family}-scaled"
    if not scaled.exists():
        if dist.get_rank() == 0:
            make_tiny_hf(start, family)
        dist.barrier()
        policy = make_policy(start, 1, 1)
        scale_weights(policy)
        policy.export_hf(scaled)
    dist.barrier()
    return start, scaled


def matrix_on_ranks(tensors: tuple[int, ...], families: tuple[str, ...]) -> list[str]:
    """All layouts that this number of ranks allows; the cases that went wrong."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    from tango_hpc.reshard.sync import WeightSync

    folder, wrong = shared_folder(), []
    layouts = [(t, p) for t, p in TRAINING if dist.get_world_size() % (t * p) == 0]
    for rollout_tensor in tensors:
        for family in families:
            start, scaled = checkpoints(folder, family)
            loader = make_engine(scaled, rollout_tensor, load_weights=True)
            expected = loaded_copies(loader)
            loader.close()
            engine = make_engine(start, rollout_tensor, load_weights=False)
            for tensor, pipeline in layouts:
                case = f"{family} {tensor}x{pipeline} to {rollout_tensor}"
                policy = make_policy(start, tensor, pipeline)
                sync = WeightSync(policy, engine, TINY_BUCKET)
                sync.sync()
                if not differing_tensors(engine, expected):
                    wrong.append(f"{case}: holds the second weights after the first sync")
                scale_weights(policy)
                stats = sync.sync()
                wrong += [f"{case}: {name}" for name in differing_tensors(engine, expected)]
                if stats.bytes_sent != stats.bytes_minimum:
                    wrong.append(f"{case}: sent {stats.bytes_sent}, minimum {stats.bytes_minimum}")
                if any(total.peak_extra_bytes > 2 * TINY_BUCKET.bucket_mb * 2**20 for total in sync.totals):
                    wrong.append(f"{case}: more than two buckets")
            engine.close()
        destroy_model_parallel()
    return wrong


@pytest.mark.parametrize("world_size, tensors", [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4))])
def test_every_layout_is_bit_exact(world_size: int, tensors: tuple[int, ...]) -> None:
    for wrong in run_ranks(matrix_on_ranks, world_size, tensors, FAMILIES, timeout=280):
        assert wrong == []
