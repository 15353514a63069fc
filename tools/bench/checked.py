"""What `tango plan` says of a GPU check's parts 5 and 6: `python -m tools.bench.checked [RECORDS.jsonl]`.

The records are those of `tools/gpu_check.sh`; by default the H100's of docs/measurements.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tango_hpc.base.config import load_config
from tango_hpc.plan.cards import card_of_driver, machine_of
from tango_hpc.plan.lengths import Lengths, Load
from tango_hpc.plan.seconds import Costs
from tests.gpu.test_5_speed import SHAPES
from tests.gpu.test_6_rollout import SIZES
from tests.helpers.tiny import tiny_hf_config
from tools.bench.published import ALONE, BASE, ROOT

RECORDS = ROOT / "docs/measurements/gpu_check_h100.jsonl"
ONE_GPU = (
    "launch.nodes=1", "launch.tasks_per_node=1", "generator.parallel.tensor=1", "generator.parallel.pipeline=1",
    "generator.parallel.sequence=false", "generator.rollout.tensor=1", "algorithm.kl_coef=0",
)  # fmt: skip


def compare(records: Path, folder: Path) -> list[tuple[str, float, float]]:
    """Return what was measured, its predicted and its measured seconds; `folder` gets the models' config.json."""
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    card, _, memory, _ = next(line["machine"]["card"] for line in lines if "machine" in line).split(", ")
    found = card_of_driver(card, float(memory.removesuffix(" MiB")))
    assert found is not None, f"{card} is not in the table of cards"
    machine, rows = machine_of(found), []
    for check, figures in passed(lines).items():
        if match := re.search(r"test_training_speed\[(.+)-(\d+)-(\w+)\]", check):
            rows += training(folder, machine, match[1], int(match[2]), match[3], figures)
        elif "test_rollout_speed" in check:
            responses, tokens = SIZES["cuda"]
            costs = plan_costs(folder, machine, "0.5B", responses, Lengths(128, tokens, tokens))
            predicted = costs.generation("generator", responses, responses).seconds
            rows.append(("rollout, 0.5B", predicted, responses * tokens / figures["rollout"]))
    return rows


def passed(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of each check that passed, by what they are."""
    return {
        line["end"]: {what: value for what, value, *_ in line["figures"]}
        for line in lines
        if line.get("outcome") == "passed"
    }


def training(
    folder: Path, machine: Any, shape: str, packed: int, recompute: str, figures: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """Return an update and a pass for log-probabilities over two micro-batches of sequences of 1,024 tokens."""
    name, tokens = f"{shape}, recompute {recompute}, {packed} tokens", 2 * packed
    settings = (f"generator.recompute={recompute}", f"generator.micro_batch_tokens={packed}")
    costs = plan_costs(folder, machine, shape, tokens // 1024, Lengths(128, 896, 896), *settings)
    share = machine.rates.training
    return [
        (f"update, {name}", costs.update("generator").seconds, tokens / figures["training"]),
        (f"log-probabilities, {name}", costs.passes("generator", 2.0, share, 0.0).seconds,
         tokens / figures["log-probabilities"]),
    ]  # fmt: skip


def plan_costs(folder: Path, machine: Any, shape: str, responses: int, lengths: Lengths, *settings: str) -> Costs:
    """Return the costs of a step with so many responses of one length on one GPU."""
    model = folder / shape
    model.mkdir(exist_ok=True)
    hf_config = tiny_hf_config(**(SHAPES[shape] | {"max_position_embeddings": 32768}))
    (model / "config.json").write_text(json.dumps(hf_config))
    batch = (
        f"train.questions_per_step={responses // 2}", "train.rollouts_per_question=2",
        f"generator.max_prompt_tokens={lengths.prompt:g}", f"generator.max_response_tokens={lengths.longest}",
    )  # fmt: skip
    config = load_config(BASE, [ALONE[0], *ONE_GPU, *batch, *settings, f"generator.model.path={model}"])
    return Costs(config, machine, Load({"generator": lengths}, {"generator": 1.0}))


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        for name, predicted, measured in compare(Path((*sys.argv, RECORDS)[1]), Path(folder)):
            print(f"| {name} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f} |")


if __name__ == "__main__":
    main()
