"""Tokens that tensor ranks share out: what that saves, and what it must leave alone. That it computes the same as
autograd for every family and layout is for test_policy_layouts.py.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.plan.sizes import Trainer
from tests.helpers.activations import kept_bytes
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf, tiny_hf_config

DIMS = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 64}
TOKENS = 251  # neither two nor four ranks can share them out evenly
WAYS = ("none", "selective", "full")
CASES = [(tensor, sequence, recompute) for tensor in (2, 4) for sequence in (False, True) for recompute in WAYS]


def make_policy(folder: Path, tensor: int, sequence: bool, recompute: str = "none") -> Any:
    optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3)
    return policy_of(
        folder,
        tensor,
        sequence=sequence,
        recompute=recompute,
        micro_batch_tokens=4096,
        optimizer=optimizer,
        total_steps=9,
    )


def on_rank(folder: Path) -> dict[str, Any]:
    from megatron.core import parallel_state

    from tango_hpc.models.trainer import pinned_memory as host_memory

    results: dict[str, Any] = {}
    for tensor, sequence, recompute in CASES:
        policy = make_policy(folder / "model", tensor, sequence, recompute)
        results[f"bytes-{tensor}-{sequence}-{recompute}"] = kept_bytes(policy, TOKENS)
        losses = [asdict(policy.update_sft(random_sequences(5, 64, seed))) for seed in range(2)]
        # One sequence for two data-parallel ranks leaves a micro-batch of nothing but filling.
        results[f"stats-{tensor}-{sequence}-{recompute}"] = [
            *losses, asdict(policy.update_sft(random_sequences(1, 64, 7)))
        ]  # fmt: skip
        if recompute == "none":
            policy.save(folder / f"saved-{tensor}-{sequence}")
            other = make_policy(folder / "model", tensor, not sequence)
            other.load(folder / f"saved-{tensor}-{sequence}")
            results[f"resumed-{tensor}-{sequence}"] = [
                asdict(trainer.update_sft(random_sequences(5, 64, 8))) for trainer in (policy, other)
            ]
    buffers = parallel_state.get_global_memory_buffer().buffer
    results["gathered"] = len(buffers)
    with (
        patch.object(host_memory, "on_gpu", lambda _: True),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(torch.cuda, "empty_cache", lambda: None),
    ):
        policy.offload()
    results["gathered, away"] = len(buffers)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sequence")
    make_tiny_hf(folder / "model", **DIMS)
    return run_ranks(on_rank, 4, folder, timeout=300)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("tensor", "sequence", "recompute"), [case for case in CASES if case[2] != "full"])
def test_what_is_kept_for_the_backward_pass_is_what_the_plan_counts(
    results: dict[str, Any], tensor: int, sequence: bool, recompute: Any
) -> None:
    shape = ModelShape.from_hf_config(tiny_hf_config(**DIMS))
    trainer = Trainer(
        shape=shape, tensor=tensor, pipeline=1, data=4 // tensor, stage=0, element_bytes=4, on_cpu=True,
        recompute=recompute, with_reference=False, sequence=sequence,
    )  # fmt: skip
    kept = (shape.num_layers * trainer.kept_per_token() + shape.hidden_size * 4) * TOKENS
    assert results[f"bytes-{tensor}-{sequence}-{recompute}"] == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("tensor", [2, 4])
def test_norms_are_kept_once_and_not_by_every_rank(results: dict[str, Any], tensor: int) -> None:
    shared, alike = (results[f"bytes-{tensor}-{sequence}-none"] for sequence in (True, False))
    assert shared < {2: 0.8, 4: 0.6}[tensor] * alike


@pytest.mark.parametrize("recompute", WAYS)
@pytest.mark.parametrize("tensor", [2, 4])
def test_updates_are_the_same(results: dict[str, Any], tensor: int, recompute: str) -> None:
    plain = results[f"stats-{tensor}-False-none"]
    for sequence in (True, False):
        for mine, theirs in zip(results[f"stats-{tensor}-{sequence}-{recompute}"], plain, strict=True):
            assert mine["num_tokens"] == theirs["num_tokens"] and not mine["skipped"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_checkpoint_of_one_is_one_of_the_other(results: dict[str, Any], tensor: int, sequence: bool) -> None:
    mine, other = results[f"resumed-{tensor}-{sequence}"]
    assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_room_for_gathered_tokens_is_given_back(results: dict[str, Any]) -> None:
    assert results["gathered"] > 0 and results["gathered, away"] == 0
