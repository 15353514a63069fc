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

from tango_hpc.config.schema import ParallelConfig, ReshardConfig
from tango_hpc.parallel.collectives import broadcast_object
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf

FAMILIES = ("qwen2", "qwen3", "llama")
TRAINING = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
TINY_BUCKET = ReshardConfig(bucket_mb=0.004, verify="always", timeout_seconds=30)


def shared_folder() -> Path:
    """One folder for all ranks; the helper that starts them removes nothing, the test run's tmp does."""
    return Path(broadcast_object(tempfile.mkdtemp(prefix="weight-sync-")))


def make_engine(model_dir: Path, tensor: int, load_weights: bool, dtype: str = "float32"):
    from tango_hpc.rollout.engine import RolloutEngine

    return RolloutEngine(
        model_dir,
        tensor=tensor,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        max_batched_tokens=256,
        device="cpu",
        load_weights=load_weights,
        kv_cache_gb=0.02,
    )


def make_policy(model_dir: Path, tensor: int, pipeline: int, dtype: str = "float32"):
    from tango_hpc.policy.policy import Policy

    return Policy(
        model_dir,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        optimizer=None,
        dtype=dtype,
        micro_batch_tokens=256,
        with_reference=False,
        total_steps=1,
    )


def loaded_copies(engine) -> dict[str, list[torch.Tensor]]:
    from tango_hpc.rollout.weights import EngineWeights

    weights = EngineWeights(engine.model)
    return {name: [copy.clone() for copy in weights.copies(name)] for name in weights.shapes()}


def reload_from(engine, folder: Path) -> None:
    """vLLM's own way: every full tensor from disk through the engine's loader.

    It leaves the packed copy of a tied output layer as it was (0.32.0, CPU), which is made good here.
    """
    engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.reload_weights(weights_path=str(folder))
    head = engine.model.lm_head
    head.quant_method.process_weights_after_loading(head)


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
def scale_weights(policy, factor: float) -> None:
    for shard in policy.named_shards().values():
        shard.mul_(factor)


def matrix_on_ranks(tensors: tuple[int, ...], families: tuple[str, ...]) -> list[str]:
    """All layouts that this number of ranks allows; the cases that went wrong."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    from tango_hpc.reshard.sync import WeightSync

    folder, wrong = shared_folder(), []
    world = dist.get_world_size()
    for rollout_tensor in tensors:
        for family in families:
            model_dir = folder / family
            if dist.get_rank() == 0 and not model_dir.exists():
                make_tiny_hf(model_dir, family)
            dist.barrier()
            engine = make_engine(model_dir, rollout_tensor, load_weights=False)
            expected_engine = make_engine(model_dir, rollout_tensor, load_weights=True)
            expected_at_first = loaded_copies(expected_engine)
            for tensor, pipeline in TRAINING:
                if world % (tensor * pipeline):
                    continue
                policy = make_policy(model_dir, tensor, pipeline)
                sync = WeightSync(policy, engine, TINY_BUCKET)
                for number in range(2):
                    case = f"{family} {tensor}x{pipeline} to {rollout_tensor}, sync {number}"
                    if number:
                        scale_weights(policy, 1.25)
                    stats = sync.sync()
                    if number:
                        exported = folder / case.replace(" ", "-")
                        policy.export_hf(exported)
                        dist.barrier()
                        reload_from(expected_engine, exported)
                    expected = loaded_copies(expected_engine) if number else expected_at_first
                    wrong += [f"{case}: {name}" for name in differing_tensors(engine, expected)]
                    if stats.bytes_sent != stats.bytes_minimum:
                        wrong.append(f"{case}: sent {stats.bytes_sent}, minimum {stats.bytes_minimum}")
                    if any(total.peak_extra_bytes > 2 * TINY_BUCKET.bucket_mb * 2**20 for total in sync.totals):
                        wrong.append(f"{case}: more than two buckets")
            engine.close()
            expected_engine.close()
        destroy_model_parallel()
    return wrong


@pytest.mark.parametrize("world_size, tensors", [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4))])
def test_every_layout_is_bit_exact(world_size: int, tensors: tuple[int, ...]) -> None:
    for wrong in run_ranks(matrix_on_ranks, world_size, tensors, FAMILIES, timeout=280):
        assert wrong == []
