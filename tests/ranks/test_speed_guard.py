"""A guard against losing a factor of two: ratios of two ways on the same machine in turn, within generous bounds.

CPU seconds are compared, so that a busy machine does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tango_hpc.base.types import TrainSequence
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.speed import cpu_ratio

# 0.70, 1.39, 0.99 and 0.36 where they were set; each bound is less than twice of that.
MOST = {
    "update against transformers, padded": 1.25,
    "an update's micro-batches against one": 2.2,
    "reinforcement against fine-tuning": 1.9,
    "log-probabilities against an update": 0.6,
}


def measure(folder: str) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    from tango_hpc.base.config.roles import OptimizerConfig
    from tango_hpc.models.trainer.loss import LossSettings
    from tools.bench.workload import QUICKSTART, make_model

    torch.set_num_threads(1)
    model_dir = make_model(Path(folder) / "model", QUICKSTART)
    options: dict[str, Any] = {"optimizer": OptimizerConfig(), "total_steps": 10**6}
    policy = policy_of(model_dir, micro_batch_tokens=16384, **options)
    cut = policy_of(model_dir, micro_batch_tokens=256, **options)
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    random = np.random.default_rng(0)
    lengths = sorted(random.integers(40, 140, 16).tolist(), reverse=True)
    batch = [random.integers(3, 48, length).tolist() for length in lengths]
    sequences = [TrainSequence(tokens[:20], tokens[20:]) for tokens in batch]
    sampled = [
        TrainSequence(tokens[:20], tokens[20:], [1.0] * (len(tokens) - 20), [-3.0] * (len(tokens) - 20))
        for tokens in batch
    ]
    loss = LossSettings()

    def padded() -> None:
        theirs.zero_grad()
        ids = torch.zeros((16, lengths[0]), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        logits = theirs(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 19:-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 20:].flatten()).backward()

    return {
        "update against transformers, padded": cpu_ratio(lambda: policy.update_sft(sequences), padded),
        "an update's micro-batches against one": cpu_ratio(
            lambda: cut.update_sft(sequences), lambda: policy.update_sft(sequences)
        ),
        "reinforcement against fine-tuning": cpu_ratio(
            lambda: policy.update(sampled, loss), lambda: policy.update_sft(sequences)
        ),
        "log-probabilities against an update": cpu_ratio(
            lambda: policy.logprobs(sequences), lambda: policy.update_sft(sequences)
        ),
    }


def test_nothing_became_twice_as_slow(tmp_path: Path) -> None:
    measured = run_ranks(measure, 1, str(tmp_path))[0]
    assert measured.keys() == MOST.keys()
    assert all(measured[name] < most for name, most in MOST.items()), measured
