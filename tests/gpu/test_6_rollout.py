"""Our engine against bare vLLM on the same prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tango_hpc.base.types import GenerationRequest, SamplingSettings
from tests.gpu.conftest import Note
from tests.gpu.test_5_speed import SHAPES
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf

SECONDS = 120
REPEATS = 3
# Prompts, tokens of each response.
SIZES = {"cuda": (256, 256), "cpu": (16, 32)}


def rollout(model_dir: str, device: Literal["cuda", "cpu"]) -> dict[str, float]:
    """Tokens a second through `RolloutEngine`, and of `LLM.generate` of the same engine on the same prompts: asked for
    the same, or for neither seeds nor log-probabilities.
    """
    from vllm import SamplingParams

    from tango_hpc.models.engine.engine import RolloutEngine

    num_prompts, num_tokens = SIZES[device]
    engine = RolloutEngine(
        Path(model_dir), tensor=1, dtype="bfloat16" if device == "cuda" else "float32", max_model_len=1024,
        max_num_seqs=num_prompts, max_batched_tokens=8192, device=device, load_weights=True,
        kv_cache_bytes=8 * 2**30 if device == "cuda" else 64 * 2**20,
    )  # fmt: skip
    prompts = np.random.default_rng(0).integers(0, 100, (num_prompts, 128)).tolist()
    requests = [GenerationRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=num_tokens)
    plain = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    def rate(work: Any) -> float:
        rates = []
        for _ in range(REPEATS + 1):
            engine.reset_prefix_cache()
            start = time.perf_counter()
            work()
            rates.append(num_prompts * num_tokens / (time.perf_counter() - start))
        return float(np.median(rates[1:]))

    return {
        "ours": rate(lambda: engine.generate(requests, sampling)),
        "bare": rate(lambda: engine.bare_generate(prompts, max_tokens=num_tokens, seeds=list(range(num_prompts)))),
        "plain": rate(lambda: engine.llm.generate([{"prompt_token_ids": p} for p in prompts], plain, use_tqdm=False)),
    }


def test_rollout_speed(device: torch.device, vllm: None, note: Note, tmp_path: Path) -> None:
    """Part 6: rollout against bare vLLM on the same prompts."""
    shape = SHAPES["0.5B"] if device.type == "cuda" else {"hidden_size": 256}  # heads of 64
    model_dir = make_tiny_hf(tmp_path / "model", **{**shape, "max_position_embeddings": 4096})
    found = run_ranks(rollout, 1, str(model_dir), device.type, timeout=280)[0]
    note("rollout", found["ours"], "tokens/s")
    note("of bare vLLM", found["ours"] / found["bare"], "", "at least 0.97")
    note("of vLLM without seeds and log-probabilities", found["ours"] / found["plain"])
    if device.type == "cuda":
        assert found["ours"] > 0.8 * found["bare"]
