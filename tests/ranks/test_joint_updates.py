"""One update on two kinds of sequences: that of the weighted sum of their losses, in every layout."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf
from tests.ranks.test_loss_layouts import LAYOUTS, OPTIMIZER, VOCAB

NUM_SOLUTIONS, NUM_JUDGEMENTS, SCALE = 5, 4, 0.5


def both_ways(folder: Path, layouts: list[tuple[int, int]]) -> dict[Any, Any]:
    """On each rank: two updates on all sequences at once, and two on both kinds with the weights of their numbers.

    Eq. 1 averages over responses, so that these are the same. "halves": the second kind at half its weight.
    """
    from tango_hpc.models.trainer.loss import Batch, LossSettings

    loss, number = LossSettings(entropy_coef=0.1), NUM_SOLUTIONS + NUM_JUDGEMENTS

    def kinds(share: float = 1.0) -> list[Batch]:
        sequences = random_sequences(number, VOCAB)
        solutions, judgements = sequences[:NUM_SOLUTIONS], sequences[NUM_SOLUTIONS:]
        return [
            Batch(solutions, loss, NUM_SOLUTIONS / number),
            Batch(judgements, loss, share * NUM_JUDGEMENTS / number),
        ]

    results = {}
    for tensor, pipeline in layouts:
        for name, batches in {
            "at once": [Batch(random_sequences(number, VOCAB), loss)],
            "jointly": kinds(),
            "halves": kinds(SCALE),
            "other temperature": [kinds()[0], replace(kinds()[1], loss=replace(loss, temperature=0.5))],
        }.items():
            policy = policy_of(folder, tensor, pipeline, micro_batch_tokens=70, optimizer=OPTIMIZER, total_steps=10)
            stats = [policy.update_jointly(batches, last=last) for last in (False, True)]
            results[tensor, pipeline, name] = {
                "stats": [asdict(one) | {"method": 0} | dict(one.method) for one in stats],
                "after": np.concatenate(policy.logprobs(random_sequences(number, VOCAB))),
            }
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("joint") / "model"
    make_tiny_hf(folder, "qwen2")
    results = {}
    for world in (1, 2, 4, 8):
        layouts = [(tensor, pipeline) for tensor, pipeline, data in LAYOUTS if tensor * pipeline * data == world]
        (first, *_) = run_ranks(both_ways, world, folder, layouts)
        results |= {(t, p, world // (t * p), name): result for (t, p, name), result in first.items()}
    return results


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_a_joint_update_is_the_update_on_all_at_once(layout: tuple[int, int, int], found: dict[Any, Any]) -> None:
    one, other = found[1, 1, 1, "at once"], found[*layout, "jointly"]
    for expected, stats in zip(one["stats"], other["stats"], strict=True):
        assert stats == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert expected["grad_norm"] > 0.1
    np.testing.assert_allclose(other["after"], one["after"], atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
@pytest.mark.parametrize("name", ["halves", "other temperature"])
def test_weights_and_temperatures_of_a_kind_count_in_every_layout(
    name: str, layout: tuple[int, int, int], found: dict[Any, Any]
) -> None:
    plain, one, other = found[1, 1, 1, "jointly"], found[1, 1, 1, name], found[*layout, name]
    assert np.abs(one["after"] - plain["after"]).max() > 5e-3
    np.testing.assert_allclose(other["after"], one["after"], atol=2e-4)
