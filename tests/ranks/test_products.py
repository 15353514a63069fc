"""Products in bfloat16 give the gradients of float32 but for their rounding, in every layout, and learn the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tango_hpc.base.config.roles import OptimizerConfig
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences
from tests.helpers.tiny import make_tiny_hf

VOCAB = 107
# tensor size, sequence parallelism; two ranks.
LAYOUTS = [(1, False), (2, False), (2, True)]


def train(folder: Path) -> list[dict[str, Any]]:
    """For each layout and kind of product: log-probabilities, and the losses of a few updates."""
    batch = random_sequences(9, VOCAB)
    results = []
    for tensor, sequence in LAYOUTS:
        for products in ("float32", "bfloat16"):
            policy = policy_of(
                folder, tensor, sequence=sequence, optimizer=OptimizerConfig(learning_rate=3e-3), total_steps=8,
                products=products,
            )  # fmt: skip
            before = np.concatenate(policy.logprobs(batch))
            stats = [policy.update_sft(batch) for _ in range(8)]
            dtypes = {parameter.dtype for parameter in policy.named_shards().values()}
            results.append(
                {"logprobs": before, "norm": stats[0].grad_norm, "losses": [s.loss for s in stats], "dtypes": dtypes}
            )
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("products")
    make_tiny_hf(folder, "qwen2", vocab_size=VOCAB)
    return run_ranks(train, 2, folder)[0]


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_rounding_is_all_that_differs(results: list[dict[str, Any]], layout: int) -> None:
    full, rounded = results[2 * layout : 2 * layout + 2]
    difference = np.abs(full["logprobs"] - rounded["logprobs"])
    assert 0 < difference.max() < 0.05, "no product was rounded, or one is wrong"
    assert rounded["norm"] == pytest.approx(full["norm"], rel=0.02)
    assert rounded["norm"] != full["norm"]
    assert rounded["losses"] == pytest.approx(full["losses"], rel=0.01)
    assert full["losses"][-1] < 0.9 * full["losses"][0]
    assert rounded["dtypes"] == {torch.float32}


def test_layouts_agree(results: list[dict[str, Any]]) -> None:
    for layout in (1, 2):
        assert results[2 * layout + 1]["losses"] == pytest.approx(results[1]["losses"], rel=0.005)
