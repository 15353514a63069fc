"""How fast the trainer is, against what the card can multiply."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tango_hpc.base.config.roles import OptimizerConfig
from tango_hpc.base.types import TrainSequence
from tests.gpu.conftest import Note
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf

# Of Qwen2.5-7B as many layers as leave room on any card of 40 GB, and of Qwen2.5-0.5B all.
SHAPES: dict[str, dict[str, Any]] = {
    "7B, 4 layers": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
        "num_hidden_layers": 4, "vocab_size": 32064, "tie_word_embeddings": False,
    },
    "0.5B": {
        "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
        "num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
REPEATS = 5
SECONDS = 60


def matrix_peak() -> float:
    """Floating-point operations a second of a large product in bf16, the best of several."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            left @ right
        torch.cuda.synchronize()
        best = max(best, 10 * 2 * size**3 / (time.perf_counter() - start))
    return best


def speed(model_dir: str, packed_tokens: int, recompute: Any) -> dict[str, float]:
    """Tokens a second of updates and of log-probabilities, what they are worth in operations, and an update's
    memory.
    """
    from tango_hpc.models.trainer.loss import LossSettings
    from tango_hpc.plan.sizes import Trainer

    policy = policy_of(
        model_dir, dtype="bfloat16", optimizer=OptimizerConfig(), total_steps=100, micro_batch_tokens=packed_tokens,
        recompute=recompute,
    )  # fmt: skip
    random = np.random.default_rng(0)
    length, vocabulary = 1024, policy.shape.vocab_size
    tokens = random.integers(0, vocabulary, (2 * packed_tokens // length, length)).tolist()
    sequences = [TrainSequence(row[:128], row[128:], [1.0] * (length - 128), [-1.0] * (length - 128)) for row in tokens]
    settings = LossSettings()

    def seconds(work: Any) -> float:
        times = []
        for _ in range(REPEATS + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return float(np.median(times[2:]))

    total = 2 * packed_tokens
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    update = seconds(lambda: policy.update(sequences, settings))
    taken = torch.cuda.max_memory_allocated() - resident
    logprobs = seconds(lambda: policy.logprobs(sequences))
    planned = Trainer(
        shape=policy.shape, tensor=1, pipeline=1, data=1, stage=0, element_bytes=2, on_cpu=False, recompute=recompute,
        with_reference=False,
    ).update_workspace(packed_tokens, 1)  # fmt: skip
    shape = policy.shape
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * length / 2  # causal: half of the square
    operations = 6 * shape.num_parameters + attention
    return {
        "update": total / update,
        "logprobs": total / logprobs,
        "operations": operations * total / update,
        "peak": matrix_peak(),
        "over the plan": taken / planned,
    }


@pytest.mark.parametrize(
    ("packed_tokens", "recompute"),
    [(16384, "none"), (16384, "selective"), (16384, "full"), (4096, "none"), (4096, "full")],
)
@pytest.mark.parametrize("name", SHAPES)
def test_training_speed(
    gpu: torch.device, name: str, packed_tokens: int, recompute: str, note: Note, tmp_path: Path
) -> None:
    """Part 5: training tokens a second, and the share of the card's matrix-product peak."""
    model_dir = make_tiny_hf(tmp_path / "model", max_position_embeddings=32768, **SHAPES[name])
    found = run_ranks(speed, 1, str(model_dir), packed_tokens, recompute, timeout=280)[0]
    share = found["operations"] / found["peak"]
    note("training", found["update"], "tokens/s")
    note("of the peak", 100 * share, "%", "45 for 7B on one H100 or H200")
    note("log-probabilities", found["logprobs"], "tokens/s")
    note("matrix-product peak", found["peak"] / 1e12, "TFLOP/s")
    note("memory of an update over the plan's", found["over the plan"], "", "at most 1.1")
    assert found["over the plan"] <= 1.1
    assert share > 0.1, "something is far from what a GPU does"
