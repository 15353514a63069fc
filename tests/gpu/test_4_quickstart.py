"""The quick start on a GPU: two roles, each in its process, learn on one card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.base.run.summary import read_summary
from tests.gpu.conftest import Note

SECONDS = 300
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_both_models_learn(gpu: torch.device, vllm: None, note: Note, tmp_path: Path) -> None:
    """Part 4: the quick start in bf16; both models learn, engine and trainer agree, switching is cheap."""
    run = RunDirectory(tmp_path / "run")
    words = [sys.executable, "-P", "-m", "tango_hpc.commands.cli"]
    for stage in ("sft", "train"):
        done = subprocess.run(
            [*words, stage, str(ROOT / "configs/quickstart_gpu.yaml"), f"run.dir={run.path}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = read_summary(run)
    before, after = summary["generator"]["accuracy_before"], summary["generator"]["accuracy_after"]
    note("accuracy before", 100 * before, "%")
    note("accuracy after", 100 * after, "%", "above 60")
    note("verifier's outcome F1", 100 * summary["verifier"]["outcome_f1_after"], "%", "above 60")
    rows = read_metrics(run, "train")
    gap = sum(row["logprob_gap/mean_abs"] for row in rows) / len(rows)
    note("log-probability gap of engine and trainer", gap, "nats", "below 0.02")
    total = sum(row["seconds/total"] for row in rows)
    note("weight sync, share of a step", 100 * sum(row["seconds/reshard"] or 0 for row in rows) / total, "%", "under 5")
    note("a step", total / len(rows), "s")
    assert after > before + 0.2 and after > 0.6 and gap < 0.02, json.dumps(summary)[:2000]
