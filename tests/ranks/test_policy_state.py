"""What changes a policy's weights and what must not: gates, checkpoints, fine-tuning, packing.

Four ranks run every scenario once, from scratch each time; the tests look at what they brought back.
"""

from __future__ import annotations

import gc
import resource
import signal
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tango_hpc.base.config.roles import OptimizerConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_ratio=0.2)
Weights = dict[str, np.ndarray]


def make_policy(folder: Path, tensor: int, pipeline: int, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "optimizer": OPTIMIZER,
        "micro_batch_tokens": 100,
        "with_reference": True,
        "total_steps": 10,
    }
    return policy_of(folder / "model", tensor, pipeline, **settings | changes)


def losses() -> Any:
    from tango_hpc.models.trainer.loss import LossSettings

    return LossSettings()


def weights_of(policy: Any) -> Weights:
    return {name: shard.detach().float().numpy().copy() for name, shard in policy.named_shards().items()}


def train(policy: Any, seeds: range) -> list[dict[str, Any]]:
    return [asdict(policy.update(random_sequences(8, 107, seed), losses())) for seed in seeds]


def non_finite(folder: Path) -> dict[str, Any]:
    """A NaN advantage, which reaches one data-parallel rank only; then a healthy update."""
    policy = make_policy(folder, 2, 1)
    train(policy, range(1))
    before = weights_of(policy)
    sequences = random_sequences(8, 107, 1)
    sequences[3].advantages[0] = float("nan")
    skipped = policy.update(sequences, losses())
    unchanged = weights_of(policy)
    healthy = train(policy, range(1, 2))
    return {"before": before, "skipped": skipped, "unchanged": unchanged, "healthy": healthy[0]["skipped"]}


def too_wide_a_gap(folder: Path) -> dict[str, Any]:
    """An engine that disagrees with the trainer."""
    from tango_hpc.models.trainer.loss import LogprobGapError

    policy = make_policy(folder, 1, 2)
    before = weights_of(policy)
    try:
        policy.update(random_sequences(8, 107), replace(losses(), max_logprob_gap=0.5))
        message = ""
    except LogprobGapError as error:
        message = str(error)
    return {"before": before, "after": weights_of(policy), "message": message}


def checkpoints(folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, three steps; and the same three again from the checkpoint, in several layouts."""
    results: dict[str, Any] = {}
    for dtype, tensor, pipeline in (("float32", 2, 1), ("float32", 2, 2), ("bfloat16", 1, 2)):
        name = f"{dtype}-{tensor}x{pipeline}"
        policy = make_policy(folder, tensor, pipeline, dtype=dtype)
        train(policy, range(2))
        policy.save(folder / name)
        first = train(policy, range(2, 5)), weights_of(policy)
        resumed = make_policy(folder, tensor, pipeline, dtype=dtype)
        resumed.load(folder / name)
        second = train(resumed, range(2, 5)), weights_of(resumed)
        results[name] = {"first": first, "second": second}
        if dtype == "float32":
            other = make_policy(folder, 1, 2 // pipeline)
            other.load(folder / name)
            results[name]["elsewhere"] = train(other, range(2, 5))
            reference = other.logprobs(random_sequences(8, 107), reference=True)
            results[name]["reference"] = np.concatenate(reference)
    fresh = make_policy(folder, 2, 2)
    fresh.save(folder / "fresh")
    fresh.load(folder / "fresh")
    results["fresh"] = {"resumed": train(fresh, range(1)), "direct": train(make_policy(folder, 2, 2), range(1))}
    results["original"] = np.concatenate(make_policy(folder, 1, 1).logprobs(random_sequences(8, 107)))
    return results


def beside_training(folder: Path) -> dict[str, Any]:
    """A save in front and one in the background, whose file is written after a step has changed everything."""
    import threading

    import torch

    from tango_hpc.models.trainer import saved_state

    policy = make_policy(folder, 2, 1)
    train(policy, range(2))
    policy.save(folder / "in front")
    may_write, write = threading.Event(), saved_state._Writer._write
    saved_state._Writer._write = lambda writer: (may_write.wait(), write(writer))[1]  # type: ignore[method-assign]
    try:
        policy.begin_save(folder / "beside", background=True)
        first = train(policy, range(2, 4)), weights_of(policy)
        was_written = policy.is_written()
        may_write.set()
        policy.end_save()
    finally:
        saved_state._Writer._write = write  # type: ignore[method-assign]
    resumed = make_policy(folder, 2, 1)
    resumed.load(folder / "beside")
    again = train(resumed, range(2, 4)), weights_of(resumed)
    names = [f"__{torch.distributed.get_rank()}_{kind}.distcp" for kind in ("weights", "training")]
    files = [[(folder / where / name).read_bytes() for name in names] for where in ("in front", "beside")]
    return {"first": first, "again": again, "was_written": was_written, "same_file": files[0] == files[1]}


def full_disk(folder: Path) -> list[str]:
    """One rank cannot write a byte: first rank 1, then rank 0, which also writes what is common to all."""
    import torch

    policy = make_policy(folder, 2, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    for full_rank in (1, 0):
        if torch.distributed.get_rank() == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            policy.save(folder / f"full-on-{full_rank}")
            messages.append("")
        except OSError as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    policy.save(folder / "with-space-again")
    return messages


def packings(folder: Path) -> dict[str, Weights]:
    """One step with different budgets, and with activations recomputed."""
    results = {}
    for name, changes in (
        ("one micro-batch", {"micro_batch_tokens": 10_000}),
        ("a sequence each", {"micro_batch_tokens": 1}),
        ("selective", {"micro_batch_tokens": 10_000, "recompute": "selective"}),
        ("full", {"micro_batch_tokens": 10_000, "recompute": "full"}),
    ):
        policy = make_policy(folder, 1, 2, **changes)
        train(policy, range(1))
        results[name] = weights_of(policy)
    return results


def fewer_sequences_than_ranks(folder: Path) -> list[dict[str, Any]]:
    """One sequence for four data-parallel ranks, three of which run empty micro-batches; and for one."""
    sequences = random_sequences(1, 107)
    return [asdict(make_policy(folder, *layout).update(sequences, losses())) for layout in ((1, 1), (2, 2))]


def fine_tuning(folder: Path) -> dict[str, Any]:
    """Cross-entropy on one batch, over and over."""
    policy = make_policy(folder, 2, 1, optimizer=OptimizerConfig(learning_rate=1e-2), with_reference=False)
    sequences = random_sequences(8, 107)
    before = policy.evaluate_sft(sequences)
    steps = [asdict(policy.update_sft(sequences)) for _ in range(8)]
    frozen = make_policy(folder, 2, 1, optimizer=None)
    return {"before": before, "steps": steps, "after": policy.evaluate_sft(sequences),
            "frozen": frozen.evaluate_sft(sequences)}  # fmt: skip


def dropped(folder: Path) -> list[str]:
    """What of a trainer that is done outlives a collection: on a GPU, memory that the next one lacks."""
    policy = make_policy(folder, 2, 2, dtype="bfloat16")
    train(policy, range(1))
    policy.save(folder / "dropped")
    held = {
        "model": weakref.ref(policy.model),
        "weights": weakref.ref(next(policy.model.parameters())),
        "gradients": weakref.ref(policy.optimizer.ddp.buffers[0].grad_data),
        "masters": weakref.ref(policy.optimizer.tensors()[0]),
    }
    assert all(thing() is not None for thing in held.values())
    del policy
    gc.collect()
    return [name for name, thing in held.items() if thing() is not None]


SCENARIOS = (
    non_finite,
    too_wide_a_gap,
    checkpoints,
    beside_training,
    full_disk,
    packings,
    fewer_sequences_than_ranks,
    fine_tuning,
    dropped,
)


def run_all(folder: Path) -> dict[str, Any]:
    return {scenario.__name__: scenario(folder) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("state")
    make_tiny_hf(folder / "model")
    return run_ranks(run_all, 4, folder, timeout=600)


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_non_finite_loss_changes_nothing(results: list[dict[str, Any]]) -> None:
    for result in (rank["non_finite"] for rank in results):
        assert result["skipped"].skipped and not result["healthy"]
        assert same(result["before"], result["unchanged"])


def test_gap_stops_all_ranks_before_the_step(results: list[dict[str, Any]]) -> None:
    for result in (rank["too_wide_a_gap"] for rank in results):
        assert "more than 0.5 allowed" in result["message"]
        assert same(result["before"], result["after"])


@pytest.mark.parametrize("name", ["float32-2x1", "float32-2x2", "bfloat16-1x2"])
def test_resuming_is_bit_exact(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        (first_stats, first), (second_stats, second) = (rank["checkpoints"][name][key] for key in ("first", "second"))
        assert first_stats == second_stats
        assert same(first, second)


def test_a_file_written_while_training_goes_on_holds_what_was_there_before(results: list[dict[str, Any]]) -> None:
    for rank in (rank["beside_training"] for rank in results):
        assert not rank["was_written"] and rank["same_file"]
        (first_stats, first), (again_stats, again) = rank["first"], rank["again"]
        assert first_stats == again_stats and same(first, again)


@pytest.mark.parametrize("name", ["float32-2x1", "float32-2x2"])
def test_resuming_in_another_layout(results: list[dict[str, Any]], name: str) -> None:
    result = results[0]["checkpoints"]
    for here, elsewhere in zip(result[name]["first"][0], result[name]["elsewhere"], strict=True):
        for key in ("loss", "grad_norm", "entropy", "learning_rate"):
            assert here[key] == pytest.approx(elsewhere[key], rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(result[name]["reference"], result["original"], atol=1e-5)


def test_a_checkpoint_before_the_first_step(results: list[dict[str, Any]]) -> None:
    fresh = results[0]["checkpoints"]["fresh"]
    assert fresh["resumed"] == fresh["direct"]


def test_a_full_disk_is_reported_on_every_rank(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert [message[:7] for message in rank["full_disk"]] == ["rank 1:", "rank 0:"]


def test_packing_does_not_matter(results: list[dict[str, Any]]) -> None:
    for rank in results:
        one = rank["packings"]["one micro-batch"]
        for other in (rank["packings"]["a sequence each"], rank["packings"]["selective"]):
            for name in one:
                np.testing.assert_allclose(one[name], other[name], atol=2e-4)  # rounding near zero, times the rate
                assert np.abs(one[name] - other[name]).mean() < 1e-6
        assert same(one, rank["packings"]["full"])


def test_ranks_without_sequences_take_part(results: list[dict[str, Any]]) -> None:
    spread, together = results[0]["fewer_sequences_than_ranks"]
    assert spread["loss"] == pytest.approx(together["loss"], abs=1e-6)
    assert spread["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-5)


def test_fine_tuning(results: list[dict[str, Any]]) -> None:
    result = results[0]["fine_tuning"]
    assert result["steps"][0]["loss"] == pytest.approx(result["before"], abs=1e-5)
    assert result["after"] < 0.5 * result["before"]
    assert result["frozen"] == pytest.approx(result["before"], abs=1e-6)
    assert result["steps"][0]["num_tokens"] == sum(len(s.response_ids) for s in random_sequences(8, 107))


def test_nothing_of_a_trainer_outlives_it(results: list[dict[str, Any]]) -> None:
    assert [result["dropped"] for result in results] == [[]] * 4
