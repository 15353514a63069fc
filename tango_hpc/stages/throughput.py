"""Metrics of a step's throughput: turns on the GPU, tokens a second, share of the peak, memory; traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import TURNS

# Where a worker's turns lie: the phase by the method that took them. A generation is the generator's or the verifier's.
_PHASE_OF = {"sync": "reshard", "prepare": "logprobs", "update": "train"}


@dataclass
class Spent:
    """The most that any process of a role used since the last question: seconds by (method, turn)."""

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_operations: float = 0.0  # a second, of all ranks


def own_turns(seconds: Mapping[str, float], spent: Mapping[str, Spent]) -> dict[str, float]:
    """Return `seconds` by phase, with waking, sleeping, on- and offloading taken out as phases of their own."""
    own = {**seconds, **dict.fromkeys(TURNS, 0.0)}
    for role, taken in spent.items():
        for (method, turn), value in taken.seconds.items():
            phase = _PHASE_OF.get(method, "rollout" if role == "generator" else "verify")
            value = min(value, own.get(phase, 0.0))
            own[phase] = own.get(phase, 0.0) - value
            own[turn] += value
    return own


def usage_metrics(
    row: Mapping[str, Any], operations: float, num_ranks: int, spent: Mapping[str, Spent]
) -> dict[str, float | None]:
    """Return tokens a second and rank, the update's share of the peak, and the most memory that a process of a role
    held.

    `row` has tokens and seconds of a step. An operation counts once, whatever is computed again to save memory.
    """
    tokens, train = row.get("tokens/generated") or row["tokens/trained"], row["seconds/train"]
    peak = max((taken.peak_operations for taken in spent.values()), default=0.0)
    rate = tokens / row["seconds/total"] if row["seconds/total"] else None
    return {
        "speed/tokens_per_second": rate,
        "speed/tokens_per_second_per_rank": rate / num_ranks if rate is not None else None,
        "speed/mfu": operations / train / peak if train and peak else None,
    } | {f"memory/{role}_peak_bytes": taken.peak_bytes for role, taken in spent.items()}


class Tracer:
    """Writes a trace of each of the steps asked for, one file per process, that Perfetto and chrome://tracing open."""

    def __init__(self, directory: RunDirectory, name: str, steps: Sequence[int]) -> None:
        self._folder, self._name, self._steps = directory.traces, name, steps
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Begin with `step`, if it was asked for."""
        if step in self._steps:
            import torch

            self._profiler = torch.profiler.profile()  # of the CPU, and of a GPU where there is one
            self._profiler.__enter__()

    def after(self, step: int) -> None:
        """End with `step`."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / f"step_{step:06d}_{self._name}.json"))
            self._profiler = None
