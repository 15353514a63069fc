"""Write tests/data/losses.json: losses and advantages of verl's public functions, in float64, to hold ours against.

In an environment of its own, because verl wants other versions:

    python3 -m venv reference && reference/bin/pip install torch verl
    reference/bin/python tools/reference_losses.py tests/data/losses.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

LENGTHS, MOST = [5, 3, 7, 4], 8
NO_BOUND = 1e9  # of verl's dual clip, which Eq. 1 has not

# Ours -> verl's function, how it averages, its settings, and ours.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("vanilla", "seq-mean-token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, {}),
    "dapo": ("vanilla", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, {}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}, {}),
    "gspo": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, {}),
    "gspo, a wide clip": (
        "gspo",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
        {"clip_low": 0.05, "clip_high": 0.1},
    ),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.1}, {"max_ratio": 1.1}),
    # Not ours: verl's default has a lower bound too, which the paper does not use.
    "cispo, both sides": ("cispo", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.1}, {}),
}
# Ours -> verl's threshold, and ours.
CORRECTIONS: dict[str, tuple[str | float, dict[str, Any]]] = {
    "tis": (1.5, {"cap": 1.5}),
    "mis": ("1e-30_1.5", {"cap": 1.5}),
    "icepop": ("0.7_1.4", {"low": 0.7, "high": 1.4}),
}


def padded(values: torch.Tensor) -> torch.Tensor:
    """Return one row per response. Shape (S, MOST)."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.nn.functional.pad(part, (0, MOST - len(part))) for part in values.split(LENGTHS)], batch_first=True
    )


def main(out: Path) -> None:
    """Compute and write."""
    generator = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)

    def drawn(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = -drawn(1.0).abs() - 0.1
    new, engine, advantages = old + drawn(0.2), old + drawn(0.3), drawn(1.0)
    mask = padded(torch.ones(count, dtype=torch.float64))
    found: dict[str, Any] = {"losses": {}, "corrections": {}, "advantages": {}}
    for name, (function, average, clips, settings) in CASES.items():
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=NO_BOUND, **clips
        )
        config.global_batch_info.update({"loss_scale_factor": MOST} if average.endswith("norm") else {})
        logprobs = new.clone().requires_grad_()
        loss, metrics = core_algos.get_policy_loss_fn(function)(
            padded(old), padded(logprobs), padded(advantages), mask, average, config
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        found["losses"][name] = {
            "function": f"compute_policy_loss_{function}",
            "average": average,
            "theirs": clips,
            "ours": settings,
            "loss": loss.item(),
            "gradient": gradient.tolist(),
            "clip_share": metrics["actor/pg_clipfrac"],
        }
    for name, (threshold, settings) in CORRECTIONS.items():
        for level in ("token", "sequence"):
            weights, _ = compute_rollout_correction_weights(padded(old - engine), mask, level, threshold)
            found["corrections"][f"{name} {level}"] = {
                "function": "compute_rollout_correction_weights",
                "theirs": threshold,
                "ours": settings,
                "weights": weights[mask.bool()].tolist(),
            }
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    at_end = torch.zeros((8, 2), dtype=torch.float64)
    at_end[:, -1] = rewards
    for name, give in {
        "grpo": lambda *args: core_algos.compute_grpo_outcome_advantage(*args),
        "dr_grpo": lambda *args: core_algos.compute_grpo_outcome_advantage(*args, norm_adv_by_std_in_grpo=False),
        "rloo": lambda *args: core_algos.compute_rloo_outcome_advantage(*args),
    }.items():
        advantages_of_groups, _ = give(at_end, torch.ones_like(at_end), np.array(groups))
        found["advantages"][name] = advantages_of_groups[:, 0].tolist()
    found["outcomes"] = {"rewards": rewards.tolist(), "groups": groups}
    source = Path(core_algos.__file__ or "").read_bytes()
    release = {
        "package": f"verl {version('verl')} (PyPI)",
        "sha256 of core_algos.py": hashlib.sha256(source).hexdigest(),
    }
    values = {"old": old, "new": new, "engine": engine, "advantages": advantages}
    batch = {"lengths": LENGTHS, "most": MOST, **{name: numbers.tolist() for name, numbers in values.items()}}
    out.write_text(json.dumps({**release, "batch": batch, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
