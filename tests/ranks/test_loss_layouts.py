"""Every shipped loss in every layout, on log-probabilities that differ from those of before the first update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tango_hpc.base.config.hooks import CorrectionConfig, LossConfig
from tango_hpc.base.config.roles import OptimizerConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

VOCAB, MOST = 107, 25
# As in test_policy_layouts: a step is nearly proportional to the gradient.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, clip_grad_norm=0.5)
# Loss and its settings, correction and its settings, the level of the correction.
METHODS: dict[str, tuple[str, dict[str, Any], str | None, dict[str, Any], str]] = {
    "grpo, tis": ("grpo", {}, "tis", {"cap": 1.5}, "token"),
    "dapo, icepop": ("dapo", {}, "icepop", {"low": 0.5, "high": 2.0}, "token"),
    "dr_grpo, mis": ("dr_grpo", {}, "mis", {"cap": 2.0}, "token"),
    "gspo": ("gspo", {"clip_low": 0.02, "clip_high": 0.02}, None, {}, "token"),
    "gspo, mis of responses": ("gspo", {"clip_low": 0.02, "clip_high": 0.02}, "mis", {"cap": 1.5}, "sequence"),
    "cispo, tis of responses": ("cispo", {"max_ratio": 1.2}, "tis", {"cap": 1.5}, "sequence"),
    "grpo, icepop of responses": ("grpo", {}, "icepop", {"low": 0.5, "high": 2.0}, "sequence"),
}
# Tensor, pipeline and data size.
LAYOUTS = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]


def two_updates(folder: Path, layouts: list[tuple[int, int]]) -> dict[Any, Any]:
    """On each rank: two updates on one batch by each method, with what they were computed from."""
    from tango_hpc.method.hooks import load_hook
    from tango_hpc.models.trainer.loss import LossSettings

    results = {}
    for tensor, pipeline in layouts:
        for name, (loss, settings, correction, of_correction, level) in METHODS.items():
            policy = policy_of(
                folder,
                tensor,
                pipeline,
                micro_batch_tokens=70,
                optimizer=OPTIMIZER,
                total_steps=10,
            )
            given = LossSettings(
                load_hook(LossConfig(name=loss, settings=settings)),
                correction and load_hook(CorrectionConfig(name=correction, settings=of_correction)),
                level,
                max_response_tokens=MOST,
            )
            asked = random_sequences(9, VOCAB)
            old = policy.logprobs(asked)
            random = np.random.default_rng(1)
            for sequence, old_T in zip(asked, old, strict=True):  # an engine of its own, and one advantage for each
                sequence.rollout_logprobs = old_T + random.normal(0, 0.3, size=len(old_T)).astype(np.float32)
                sequence.advantages = [sequence.advantages[0]] * len(old_T)
            policy.prepare(asked, given)
            first = policy.update(asked, given, last=False)
            present = policy.logprobs(asked)
            policy.prepare_next(asked, given)
            second = policy.update(asked, given)
            results[tensor, pipeline, name] = {
                "stats": [{"loss": one.loss, "grad_norm": one.grad_norm, **one.method} for one in (first, second)],
                "old": old,
                "present": present,
                "engine": [sequence.rollout_logprobs for sequence in asked],
                "advantages": [sequence.advantages for sequence in asked],
                "after": policy.logprobs(asked),
            }
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int, str], Any]:
    folder = tmp_path_factory.mktemp("losses") / "model"
    make_tiny_hf(folder, "qwen2")
    results = {}
    for world in (1, 2, 4, 8):
        layouts = [(tensor, pipeline) for tensor, pipeline, data in LAYOUTS if tensor * pipeline * data == world]
        by_rank = run_ranks(two_updates, world, folder, layouts)
        for (tensor, pipeline, name), result in by_rank[0].items():
            assert all(other[tensor, pipeline, name]["stats"] == result["stats"] for other in by_rank)
            results[tensor, pipeline, world // (tensor * pipeline), name] = result
    return results


def by_definition(name: str, result: dict[str, Any]) -> dict[str, float]:
    """The second update's loss and shares, response by response, from log-probabilities."""
    loss, _, correction, of_correction, level = METHODS[name]
    total, clipped, touched, lengths = 0.0, [], [], [len(old) for old in result["old"]]
    for number, length in enumerate(lengths):
        old, now, engine = (result[key][number].astype(np.float64) for key in ("old", "present", "engine"))
        advantage, ratio, gap = result["advantages"][number][0], np.exp(now - old), old - engine
        gap = np.full(length, gap.sum()) if level == "sequence" else gap
        if loss == "gspo":
            ratio = np.full(length, np.prod(ratio) ** (1 / length))
        if loss == "cispo":
            terms, clip = -np.minimum(ratio, 1.2) * advantage * now, ratio > 1.2
        else:
            high = {"dapo": 1.28, "gspo": 1.02}.get(loss, 1.2)
            bounded = np.clip(ratio, 0.98 if loss == "gspo" else 0.8, high)
            terms = -np.minimum(ratio * advantage, bounded * advantage)
            clip = bounded * advantage < ratio * advantage
        weight = np.exp(gap)
        outside = (weight > of_correction.get("cap", of_correction.get("high", np.inf))) | (
            weight < of_correction.get("low", 0)
        )
        if correction:
            terms = terms * np.where(outside, 1.5 if correction == "tis" else 0.0, weight)
        divisor = {"dapo": sum(lengths), "cispo": sum(lengths), "dr_grpo": len(lengths) * MOST}
        total += terms.sum() / divisor.get(loss, len(lengths) * length)
        clipped.append(clip)
        touched.append(outside)
    share = {"tis": "truncated_share"}.get(correction or "", "masked_share")
    shares = {f"correction/{share}": np.concatenate(touched).mean()} if correction else {}
    return {"loss": total, "loss/clip_share": np.concatenate(clipped).mean(), **shares}


@pytest.mark.parametrize("name", METHODS)
def test_a_second_update_is_that_of_the_definition(name: str, found: dict[Any, Any]) -> None:
    result = found[1, 1, 1, name]
    first, second = result["stats"]
    expected = by_definition(name, result)
    for key, value in expected.items():
        assert second[key] == pytest.approx(value, abs=1e-5), key
        assert value > 0 or key == "loss"  # something is clipped, truncated, masked
    assert first["loss/clip_share"] == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
@pytest.mark.parametrize("name", METHODS)
def test_no_layout_shows(name: str, layout: tuple[int, int, int], found: dict[Any, Any]) -> None:
    one, other = found[1, 1, 1, name], found[*layout, name]
    for expected, stats in zip(one["stats"], other["stats"], strict=True):
        assert stats.keys() == expected.keys()
        for key, value in expected.items():
            assert stats[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    change = np.concatenate(one["after"]) - np.concatenate(one["old"])
    assert np.abs(change).max() > 0.05
    np.testing.assert_allclose(np.concatenate(other["after"]), np.concatenate(one["after"]), atol=2e-4)


def test_a_mask_of_responses_leaves_them_out_whole(found: dict[Any, Any]) -> None:
    """GSPO with and without: another loss, and the same policy before the first update."""
    plain, masked = found[1, 1, 1, "gspo"], found[1, 1, 1, "gspo, mis of responses"]
    np.testing.assert_array_equal(np.concatenate(plain["old"]), np.concatenate(masked["old"]))
    assert plain["stats"][0]["loss"] != masked["stats"][0]["loss"]
