"""Our engine against bare vLLM on the same prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tango_hpc.types import GenerationRequest, SamplingSettings
from tests.gpu.conftest import Note
from tests.gpu.test_5_speed import SHAPES
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf

PROMPTS, TOKENS, REPEATS = 256, 256, 3


def rollout(model_dir: str) -> dict[str, float]:
    """Tokens a second through `RolloutEngine`, and of `LLM.generate` of the same engine on the same prompts: asked for the
    same, or for neither seeds nor log-probabilities.
    """
    from vllm import SamplingParams

    from tango_hpc.rollout.engine import RolloutEngine

    engine = RolloutEngine(
        Path(model_dir), tensor=1, dtype="bfloat16", max_model_len=1024, max_num_seqs=PROMPTS, max_batched_tokens=8192,
        device="cuda", load_weights=True, kv_cache_bytes=8 * 2**30,
    )  # fmt: skip
    prompts = np.random.default_rng(0).integers(0, 30_000, (PROMPTS, 128)).tolist()
    requests = [GenerationRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=TOKENS)
    plain = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def rate(work: Any) -> float:
        rates = []
        for _ in range(REPEATS + 1):
            engine.reset_prefix_cache()
            start = time.perf_counter()
            work()
            rates.append(PROMPTS * TOKENS / (time.perf_counter() - start))
        return float(np.median(rates[1:]))

    return {
        "ours": rate(lambda: engine.generate(requests, sampling)),
        "bare": rate(lambda: engine.bare_generate(prompts, max_tokens=TOKENS, seeds=list(range(PROMPTS)))),
        "plain": rate(lambda: engine.llm.generate([{"prompt_token_ids": p} for p in prompts], plain, use_tqdm=False)),
    }


def test_rollout_speed(gpu: torch.device, note: Note, tmp_path: Path) -> None:
    """Part 6: rollout against bare vLLM on the same prompts."""
    pytest.importorskip("vllm")
    model_dir = make_tiny_hf(tmp_path / "model", max_position_embeddings=4096, **SHAPES["0.5B"])
    found = run_ranks(rollout, 1, str(model_dir), timeout=280)[0]
    note("rollout", found["ours"], "tokens/s")
    note("of bare vLLM", found["ours"] / found["bare"], "", "at least 0.97")
    note("of vLLM without seeds and log-probabilities", found["ours"] / found["plain"])
    assert found["ours"] > 0.8 * found["bare"]
