"""`python -m tools.bench logprobs`: log-probabilities at a large vocabulary, forward and backward, against plain
log_softmax.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tools.bench.local_ranks import run_on_ranks
from tools.bench.measure import Measurement
from tools.bench.workload import read_settings, write_settings

# Of Qwen2.5-0.5B.
_VOCABULARY, _HIDDEN, _TOKENS = 151936, 896, 2048


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """Seconds, and memory on top of what goes in and comes out."""
    write_settings(folder / "logprobs", {"repeats": repeats})
    threads = len(os.sched_getaffinity(0))
    found = run_on_ranks("tools.bench.logprobs:on_rank", folder / "logprobs", ranks=1, threads=threads)
    what = f"log-probabilities, {_TOKENS} tokens, vocabulary of {_VOCABULARY:,}, hidden size {_HIDDEN}"
    rows = []
    for name, unit, goal in (("seconds", "s", 1.0), ("bytes", "bytes", 0.25)):
        ours, theirs = found["ours"][name], found["plain"][name]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        label = "logprobs-time" if name == "seconds" else "logprobs-memory"
        rows.append(Measurement(label, what, "log_softmax over full logits", unit, ours, theirs, ratios, goal, False,
                                {"largest_difference": found["difference"]}))  # fmt: skip
    return rows


def on_rank(folder: Path) -> dict[str, Any]:
    """Both ways in turn."""
    import time

    import torch
    import torch.distributed as dist

    from tango_hpc.models.trainer.vocab_parallel import OutputLayer, vocab_parallel_loss
    from tools.bench.peak_memory import PeakMemory

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((_TOKENS, _HIDDEN), generator=generator, requires_grad=True)
    weight = (0.02 * torch.randn((_VOCABULARY, _HIDDEN), generator=generator)).requires_grad_()
    targets = torch.randint(0, _VOCABULARY, (_TOKENS,), generator=generator)

    def ours() -> torch.Tensor:
        values = []

        def loss(logprobs: torch.Tensor, _entropy: torch.Tensor, _part: slice) -> torch.Tensor:
            values.append(logprobs.detach())
            return logprobs.sum()

        layer = OutputLayer(weight_of_ours, dist.group.WORLD, _VOCABULARY)
        vocab_parallel_loss(hidden, targets, layer, loss).backward()
        return torch.cat(values)

    def plain() -> torch.Tensor:
        values = (hidden @ weight.t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        values.sum().backward()
        return values

    # The gradients are there before and after, so that what is measured is what comes on top; ours of the weight where
    # a
    # trainer keeps it.
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    weight_of_ours = weight.detach().requires_grad_()
    weight_of_ours.main_grad = torch.zeros_like(weight)
    found: dict[str, Any] = {name: {"seconds": [], "bytes": []} for name in ("ours", "plain")}
    results = {}
    for turn in range(read_settings(folder)["repeats"] + 1):
        for name, way in (("ours", ours), ("plain", plain)):
            with PeakMemory() as memory:
                start = time.perf_counter()
                results[name] = way().detach()
                seconds = time.perf_counter() - start
            if turn:
                found[name]["seconds"].append(seconds)
                found[name]["bytes"].append(memory.peak_bytes)
    found["difference"] = float((results["ours"] - results["plain"]).abs().max())
    return found
