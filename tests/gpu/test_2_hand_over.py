"""What a trainer leaves on the GPU when it is not at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tango_hpc.base.config.roles import OptimizerConfig
from tests.gpu.conftest import Note
from tests.helpers.policies import policy_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import make_tiny_hf

SECONDS = 45
CYCLES = 50
DIMENSIONS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
}


def cycle(model_dir: str) -> dict[str, Any]:
    """Bytes on the GPU with everything there, with the weights alone, and asleep; and after many cycles."""
    from tango_hpc.plan.sizes import Trainer

    policy = policy_of(model_dir, dtype="bfloat16", optimizer=OptimizerConfig(), total_steps=1)
    trainer = Trainer(
        shape=policy.shape, tensor=1, pipeline=1, data=1, stage=0, element_bytes=2, on_cpu=False, recompute="none",
        with_reference=False,
    )  # fmt: skip
    found: dict[str, Any] = {"sizes": trainer.sizes, "asleep": [], "reserved": []}
    for number in range(CYCLES):
        policy.offload()
        found["asleep"].append(torch.cuda.memory_allocated())
        found["reserved"].append(torch.cuda.memory_reserved())
        policy.onload(weights_only=True)
        found["weights"] = torch.cuda.memory_allocated()
        policy.onload()
        found["all"] = torch.cuda.memory_allocated()
        checksum = sum(float(shard.float().sum()) for shard in policy.named_shards().values())
        assert number == 0 or checksum == found["checksum"], "weights changed on their way"
        found["checksum"] = checksum
    return found


def test_memory_of_a_trainer(gpu: torch.device, note: Note, tmp_path: Path) -> None:
    """Part 2: a trainer takes what the plan says, leaves nothing behind, and does not grow over 50 cycles."""
    found = run_ranks(cycle, 1, str(make_tiny_hf(tmp_path / "model", **DIMENSIONS)))[0]
    sizes = found["sizes"]
    for what, measured, planned in (
        ("weights alone", found["weights"], sizes.weights),
        ("weights, gradients, optimizer", found["all"], sizes.resident),
    ):
        note(f"{what}: measured over planned", measured / planned, "", "0.9 to 1.1")
        assert 0.9 <= measured / planned <= 1.1
    note("asleep", found["asleep"][-1] / 2**20, "MiB", "at most 8")
    assert max(found["asleep"]) <= 8 * 2**20
    growth = found["reserved"][-1] - found["reserved"][4]
    note(f"growth over {CYCLES} cycles", growth / 2**20, "MiB", "0")
    assert growth == 0
