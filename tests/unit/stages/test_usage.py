"""What a step took: turns as phases of their own, operations, rates, traces that open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.models.trainer.flops import measured_peak, update_operations
from tango_hpc.stages.throughput import Spent, Tracer, own_turns, usage_metrics
from tests.helpers.tiny import tiny_hf_config


def test_turns_come_out_of_the_phases_they_lie_in() -> None:
    seconds = {"rollout": 5.0, "verify": 4.0, "reshard": 2.0, "train": 3.0, "logprobs": 1.0, "score": 0.1}
    spent = {
        "generator": Spent({("generate", "wake"): 1.0, ("generate", "sleep"): 0.5, ("sync", "onload"): 0.25}),
        "verifier": Spent({("generate", "wake"): 2.0, ("update", "offload"): 9.0}),
    }
    own = own_turns(seconds, spent)
    assert own["rollout"] == 3.5 and own["verify"] == 2.0 and own["reshard"] == 1.75
    assert own["train"] == 0.0 and own["offload"] == 3.0, "a turn is no longer than what it lies in"
    assert own["wake"] == 3.0 and own["sleep"] == 0.5 and own["onload"] == 0.25
    assert sum(own.values()) == pytest.approx(sum(seconds.values()))


def test_operations_are_those_counted_by_hand() -> None:
    shape = ModelShape.from_hf_config(tiny_hf_config())
    # Twice for the forward and four times for the backward pass of each weight; of attention, half of two products.
    layers, heads, dim = 2, 4, 16
    attention = 3 * (2 * 2 * layers * heads * dim * (10**2 + 4**2)) / 2
    assert update_operations(shape, [10, 4], frozen=False) == 6 * shape.num_parameters * 14 + attention
    assert update_operations(shape, [10, 4], frozen=True) == 4 * shape.num_parameters * 14 + attention


def test_rates() -> None:
    row = {"tokens/generated": 1000, "tokens/trained": 400, "seconds/total": 4.0, "seconds/train": 2.0}
    spent = {"generator": Spent({}, 7, 1e9), "verifier": Spent({}, 9, 1e9)}
    assert usage_metrics(row, 5e8, 2, spent) == {
        "speed/tokens_per_second": 250.0,
        "speed/tokens_per_second_per_rank": 125.0,
        "speed/mfu": 0.25,
        "memory/generator_peak_bytes": 7,
        "memory/verifier_peak_bytes": 9,
    }
    assert measured_peak(torch.float32, torch.device("cpu")) > 1e8


def test_a_trace_of_the_steps_asked_for_opens(tmp_path: Path) -> None:
    tracer = Tracer(RunDirectory(tmp_path), "generator-0", (2,))
    for step in (1, 2, 3):
        tracer.before(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        tracer.after(step)
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == "step_000002_generator-0.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::mm" in names
