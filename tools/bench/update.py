"""`python -m tools.bench update`: an update of the trainer against transformers, on the same tokens, in one process.

Ours is the whole update, optimizer included; transformers do forward and backward. Each side gets its best number of
threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench.local_ranks import run_on_ranks
from tools.bench.measure import Measurement, speeds
from tools.bench.workload import QUICKSTART, make_model, read_settings, write_settings

if TYPE_CHECKING:
    import torch

    from tango_hpc.base.types import TrainSequence

_BATCH = 64
_PADDED_ROWS = 16  # of a padded batch, sorted by length


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """Tokens a second of both, and what ours are worth in floating-point operations."""
    model = make_model(folder / "model", QUICKSTART)
    write_settings(folder / "update", {"model": str(model), "repeats": repeats})
    cores = len(os.sched_getaffinity(0))
    found = run_on_ranks("tools.bench.update:on_rank", folder / "update", ranks=1, threads=cores)
    best = {arm: max(by_threads.values(), key=lambda values: sorted(values)[len(values) // 2])
            for arm, by_threads in found["tokens_per_second"].items()}  # fmt: skip
    details = {"by_threads": found["tokens_per_second"], "tokens": found["tokens"], "parameters": found["parameters"]}
    what = f"update of {found['parameters'] / 1e6:.1f}M parameters, {found['tokens']:,} tokens"
    operations = [6 * found["parameters"] * value for value in best["ours"]]
    return [
        speeds("update-padded", what, "transformers, padded", "tokens/s", best["ours"], best["padded"], 1.3, **details),
        speeds("update-packed", what, "transformers, packed", "tokens/s", best["ours"], best["packed"], 1.0, **details),
        speeds("update-peak", what, "a large matrix product", "FLOP/s", operations, found["peak"], 0.5, **details),
    ]


def on_rank(folder: Path) -> dict[str, Any]:
    """Time all arms in one process, at one thread and at all."""
    import torch
    from transformers import AutoModelForCausalLM

    from tango_hpc.base.config.roles import ModelConfig, OptimizerConfig, RoleConfig
    from tango_hpc.models.trainer.policy import Policy

    settings = read_settings(folder)
    model_dir, repeats = Path(settings["model"]), settings["repeats"]
    policy = Policy(
        RoleConfig(model=ModelConfig(path=model_dir)), "float32", optimizer=OptimizerConfig(), total_steps=10**6
    )
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    sequences = _sequences(policy.shape.vocab_size)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    # A packed batch's attention mask grows with its square; several sizes, and the best one counts.
    arms: dict[str, Callable[[], Any]] = {
        "ours": partial(policy.update_sft, sequences),
        "padded": partial(_padded_update, theirs, sequences),
        **{f"packed {rows}": partial(_packed_update, theirs, sequences, rows) for rows in (4, 1, 16)},
    }
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(repeats + 1):  # the first warms up
            for arm, work in arms.items():
                start = time.perf_counter()
                work()
                if turn:
                    times[arm].append(num_tokens / (time.perf_counter() - start))
        for arm, values in times.items():
            found[arm][str(threads)] = values
    packed_arms = {f"{arm}, {threads} threads": values for arm in list(found) if arm.startswith("packed")
                   for threads, values in found.pop(arm).items()}  # fmt: skip
    return {
        "tokens_per_second": {**found, "packed": packed_arms},
        "tokens": num_tokens,
        "parameters": policy.shape.num_parameters,
        "peak": _peak(repeats),
    }


def _sequences(vocab_size: int) -> list[TrainSequence]:
    """Return random sequences, the longest first."""
    import numpy as np

    from tango_hpc.base.types import TrainSequence

    random = np.random.default_rng(0)
    sequences = []
    for prompt, response in zip(random.integers(20, 80, _BATCH), random.integers(10, 90, _BATCH), strict=True):
        tokens = random.integers(3, vocab_size, prompt + response).tolist()
        sequences.append(TrainSequence(tokens[:prompt], tokens[prompt:]))
    return sorted(sequences, key=lambda sequence: -sequence.num_tokens)


def _padded_update(model: Any, sequences: list[TrainSequence]) -> None:
    """Compute the gradients of the mean cross-entropy with transformers, in padded batches."""
    import torch

    model.zero_grad()
    num_responses = sum(len(sequence.response_ids) for sequence in sequences)
    for first in range(0, len(sequences), _PADDED_ROWS):
        rows = sequences[first : first + _PADDED_ROWS]
        longest = rows[0].num_tokens
        ids = torch.zeros((len(rows), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        bounds = []
        for i, row in enumerate(rows):
            ids[i, : row.num_tokens] = torch.tensor([*row.prompt_ids, *row.response_ids])
            mask[i, : row.num_tokens] = 1
            bounds.append((i * longest + len(row.prompt_ids) - 1, i * longest + row.num_tokens - 1))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        (_loss(logits.flatten(0, 1), rows, bounds) / num_responses).backward()


def _packed_update(model: Any, sequences: list[TrainSequence], rows_at_once: int) -> None:
    """Compute the same gradients with transformers, `rows_at_once` sequences joined to one."""
    import torch

    model.zero_grad()
    num_responses = sum(len(sequence.response_ids) for sequence in sequences)
    for first in range(0, len(sequences), rows_at_once):
        rows = sequences[first : first + rows_at_once]
        ids: list[int] = []
        positions: list[int] = []
        bounds: list[tuple[int, int]] = []
        start = 0
        for row in rows:
            ids += [*row.prompt_ids, *row.response_ids]
            positions += range(row.num_tokens)
            bounds.append((start + len(row.prompt_ids) - 1, start + row.num_tokens - 1))
            start += row.num_tokens
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
        logits = model(**inputs, use_cache=False).logits
        (_loss(logits[0], rows, bounds) / num_responses).backward()


def _loss(logits_TV: torch.Tensor, rows: list[TrainSequence], bounds: list[tuple[int, int]]) -> torch.Tensor:
    """Return the summed cross-entropy of the responses; `bounds`: the positions that predict each response."""
    import torch
    import torch.nn.functional as F

    targets = torch.tensor([token for row in rows for token in row.response_ids])
    positions = torch.cat([torch.arange(start, stop) for start, stop in bounds])
    return -F.log_softmax(logits_TV[positions].float(), -1).gather(-1, targets[:, None]).sum()


def _peak(repeats: int) -> list[float]:
    """Return the FLOP/s of a large matrix product."""
    import torch

    peak = []
    left, right = torch.randn(2048, 1024), torch.randn(1024, 1024)
    for turn in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(4):
            left @ right
        if turn:
            peak.append(4 * 2 * 2048 * 1024 * 1024 / (time.perf_counter() - start))
    return peak
