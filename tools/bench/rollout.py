"""`python -m tools.bench rollout`: our engine against `vllm.LLM.generate` of the same engines, on the same prompts.

Ours hands all requests to all ranks and all generations back, with seeds and log-probabilities; bare vLLM completes a
rank's share of the prompts with neither. In the second row vLLM is asked
for these two as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tools.bench.local_ranks import run_on_ranks
from tools.bench.measure import Measurement, alternate, speeds
from tools.bench.workload import SMALL, make_model, read_settings, write_settings

_PROMPTS, _MAX_TOKENS = 160, 64


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """Tokens a second of ours and of vLLM, asked for less and for the same."""
    model = make_model(folder / "small", SMALL)
    write_settings(folder / "rollout", {"model": str(model), "repeats": repeats})
    ranks = min(2, len(os.sched_getaffinity(0)))
    found = run_on_ranks("tools.bench.rollout:on_rank", folder / "rollout", ranks=ranks, threads=1)
    tokens = _PROMPTS * _MAX_TOKENS
    rates = {arm: [tokens / seconds for seconds in values] for arm, values in found.items()}
    what = f"rollout of {_PROMPTS} prompts, {_MAX_TOKENS} tokens each, {ranks} ranks"
    bare = f"{ranks} bare vLLM engines"
    same = f"{bare} asked for seeds and log-probabilities"
    return [
        speeds("rollout", what, bare, "tokens/s", rates["ours"], rates["bare"], 0.97),
        speeds("rollout-same", what, same, "tokens/s", rates["ours"], rates["same"], None),
    ]


def on_rank(folder: Path) -> dict[str, Any]:
    """All on the engine of this rank."""
    import numpy as np
    import torch.distributed as dist

    from tango_hpc.base.types import GenerationRequest, SamplingSettings
    from tango_hpc.models.engine.engine import RolloutEngine

    settings = read_settings(folder)
    engine = RolloutEngine(
        Path(settings["model"]), tensor=1, dtype="float32", max_model_len=208, max_num_seqs=256,
        max_batched_tokens=4096, device="cpu", load_weights=True, kv_cache_bytes=2**29,
    )  # fmt: skip
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 48, random.integers(8, 40)).tolist() for _ in range(_PROMPTS)]
    requests = [GenerationRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=_MAX_TOKENS)
    share = prompts[dist.get_rank() :: dist.get_world_size()]
    seeds = list(range(len(share)))

    def ours() -> None:
        engine.generate(requests, sampling)
        dist.barrier()

    def bare() -> None:
        engine.bare_generate(share, max_tokens=_MAX_TOKENS)
        dist.barrier()

    def same() -> None:
        engine.bare_generate(share, max_tokens=_MAX_TOKENS, seeds=seeds)
        dist.barrier()

    return alternate({"ours": ours, "bare": bare, "same": same}, settings["repeats"])
