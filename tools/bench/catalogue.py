"""What `python -m tools.bench` can measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tools.bench.measure import Measurement

Measure = Callable[[Path, int], list[Measurement]]


@dataclass(frozen=True)
class Comparison:
    """One name of the command. `function`, as "module:name", measures in a folder, so many times each."""

    what: str
    against: str
    function: str

    def load(self) -> Measure:
        """The function; imports what it needs."""
        module, _, name = self.function.partition(":")
        measure: Measure = getattr(import_module(f"tools.bench.{module}"), name)
        return measure


COMPARISONS = {
    "update": Comparison("an update of the trainer", "transformers, padded and packed", "update:measure"),
    "logprobs": Comparison(
        "log-probabilities at a vocabulary of 152K", "log_softmax over full logits", "logprobs:measure"
    ),
    "rollout": Comparison(
        "a rollout", "bare vLLM on the same prompts, with and without seeds and log-probabilities", "rollout:measure"
    ),
    "reshard": Comparison("the weight sync", "gather and reload", "reshard:measure"),
    "tango": Comparison("a Tango step", "a GRPO step, and what lies outside the phases", "grpo:measure_tango"),
    "save": Comparison("saving a checkpoint", "the same without checksums", "save:measure"),
    "start": Comparison("from the command to the first tokens", "bare vLLM", "start:measure"),
    "grpo": Comparison("a GRPO step", "TRL's GRPOTrainer (tools/bench_trl.sh)", "grpo:measure_trl"),
    "growth": Comparison("seconds as work grows", "the work itself", "growth:measure"),
}
