"""Runs that others have published, and what `tango plan` says of them: `python -m tools.bench.published [FILE.json]`.

Each is GRPO without a verifier on another framework. What its page leaves open is a range, and so is the prediction.
Old log-probabilities are a pass of their own there, and here none: a correction of whole responses stands for it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tango_hpc.base.config import Config, load_config
from tango_hpc.plan.cards import card_named, machine_of
from tango_hpc.plan.lengths import Lengths, Load
from tango_hpc.plan.seconds import TimePlan, plan_time

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs/paper/qwen.yaml"
ALONE = [str(ROOT / "configs/methods/alone.yaml"), "algorithm.correction.level=sequence"]


@dataclass(frozen=True)
class Published:
    """A run of another framework. `seconds` by phase as its page has them; `prompt` and `response`: mean tokens, of
    responses the least and the most that the page leaves open.
    """

    name: str
    source: str
    card: str
    nodes: int
    per_node: int
    settings: tuple[str, ...]
    prompt: int
    response: tuple[int, int]
    seconds: dict[str, float]
    held_out: bool = False

    def config(self) -> Config:
        """Return the run as a configuration of ours."""
        cluster = [f"launch.nodes={self.nodes}", f"launch.tasks_per_node={self.per_node}"]
        return load_config(BASE, [*ALONE, *cluster, *self.settings])

    def predicted(self, response: int) -> dict[str, float]:
        """Return seconds by phase with responses of this mean length."""
        config = self.config()
        lengths = Lengths(self.prompt, response, config.generator.max_response_tokens)
        load = Load({"generator": lengths}, {"generator": 1.0})
        return by_phase(plan_time(config, machine_of(card_named(self.card)), load))


def by_phase(plan: TimePlan) -> dict[str, float]:
    """Return the phases that the pages name, and the step."""
    found = {name: cost.seconds for name, cost in plan.steps["generator"].items()}
    return {
        "generation": found["rollout"],
        "log-probabilities": found["logprobs"],
        "update": found["train"],
        "step": sum(found.values()),
    }


NEMO = "NeMo-RL v0.5, docs/about/performance-summary.md of e7c0123d7"
VERL = "verl, docs/advance/one_step_off.md, 07/17/2025, and its shell scripts"
NEMO_BATCH = ("train.questions_per_step=64", "train.rollouts_per_question=32", "generator.recompute=full")
NEMO_LENGTHS = ("generator.max_prompt_tokens=1024", "generator.max_response_tokens=3072")
VERL_BATCH = (
    "generator.model.path=models/Qwen2.5-7B", "train.questions_per_step=512", "train.rollouts_per_question=16",
    "generator.max_prompt_tokens=2048", "generator.micro_batch_tokens=20480", "algorithm.kl_coef=0",
    "generator.recompute=none", "generator.rollout.tensor=2", "generator.rollout.gpu_memory_utilization=0.8",
)  # fmt: skip


def _cut(tensor: int, pipeline: int, engine: int) -> tuple[str, ...]:
    return (
        f"generator.parallel.tensor={tensor}",
        f"generator.parallel.pipeline={pipeline}",
        f"generator.parallel.sequence={str(tensor > 1).lower()}",
        f"generator.rollout.tensor={engine}",
    )


RUNS = (
    Published(
        "verl, DAPO, Qwen2.5-Math-7B, 16 H20, Megatron", VERL, "H20", 2, 8,
        (*VERL_BATCH, *_cut(2, 2, 2), "generator.max_response_tokens=8192"), 150, (700, 1500),
        {"generation": 207, "log-probabilities": 119, "update": 344, "step": 699},
    ),
    Published(
        "NeMo-RL, GRPO, Llama-3.1-8B, 16 H100", NEMO, "H100", 2, 8,
        ("generator.model.path=models/Llama-3.1-8B-Instruct", *NEMO_BATCH, *NEMO_LENGTHS, *_cut(1, 2, 1),
         "generator.micro_batch_tokens=4096"),
        150, (870, 1000), {"step": 92.8},
    ),
    Published(
        "NeMo-RL, GRPO, Llama-3.1-8B, 8 GB200", NEMO, "GB200", 2, 4,
        ("generator.model.path=models/Llama-3.1-8B-Instruct", *NEMO_BATCH, *NEMO_LENGTHS, *_cut(1, 1, 1),
         "generator.micro_batch_tokens=4096"),
        150, (916, 1050), {"step": 91.0},
    ),
    Published(
        "NeMo-RL, GRPO, Qwen3-32B, 32 H100", NEMO, "H100", 4, 8,
        ("generator.model.path=models/Qwen3-32B", *NEMO_BATCH, *NEMO_LENGTHS, *_cut(4, 4, 4),
         "generator.micro_batch_tokens=4096"),
        150, (3000, 3071), {"step": 376}, held_out=True,
    ),
    Published(
        "NeMo-RL, GRPO, Qwen3-32B, 16 GB200", NEMO, "GB200", 4, 4,
        ("generator.model.path=models/Qwen3-32B", *NEMO_BATCH, *NEMO_LENGTHS, *_cut(2, 1, 1),
         "generator.micro_batch_tokens=4096"),
        150, (3000, 3071), {"step": 381}, held_out=True,
    ),
)  # fmt: skip


def main() -> None:
    """Print the table; write it as JSON where a file is named."""
    rows = []
    for run in RUNS:
        low, high = (run.predicted(response) for response in run.response)
        for phase, published in run.seconds.items():
            bounds = [low[phase], high[phase]]
            ratios = [bound / published for bound in bounds]
            rows.append({
                "run": run.name, "source": run.source, "phase": phase, "published": published,
                "predicted": [round(bound, 1) for bound in bounds], "ratio": [round(ratio, 2) for ratio in ratios],
                "held_out": run.held_out,
            })  # fmt: skip
            print(f"{run.name:48} {phase:18} {published:7.1f} {bounds[0]:7.1f} to {bounds[1]:7.1f}  "
                  f"{ratios[0]:.2f} to {ratios[1]:.2f}{'  held out' if run.held_out else ''}")  # fmt: skip
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
