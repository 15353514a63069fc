"""Predicted seconds against measured ones: rates of this machine, and a run that they were not fitted to."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tango_hpc.base.config import load_config
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.measure_rates import TINY, measure_rates, small_run
from tango_hpc.questions.tasks.tiny import build_tiny_model
from tango_hpc.report.run_page import write_report
from tests.helpers.runs import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"
OWN_RUN = ["run.dir=/nowhere/run"]  # what lies in ./runs/quickstart must not count
LEAST_SECONDS = 0.3  # of a phase that is compared: below that, what other programs do here is as large


def test_measured_rates_predict_another_run_within_a_factor_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says so itself after its tenth step: in the log, in expected.json and in the report."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shown = io.StringIO()
    larger = TinyModelConfig(hidden_size=384, intermediate_size=1024, num_heads=6, num_layers=4)
    monkeypatch.setattr("tango_hpc.commands.measure_rates.RUNS", ((TINY, 2, 4), (larger, 4, 4)))
    measure_rates(QUICKSTART, OWN_RUN, Console(file=shown, width=200))
    assert "Training reaches" in shown.getvalue() and "Kept in" in shown.getvalue()

    for seed, role in enumerate(("generator", "verifier")):  # of another size than those that were measured
        build_tiny_model(tmp_path / role, TinyModelConfig(hidden_size=256, intermediate_size=768, num_heads=8), seed)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(small_run(load_config(QUICKSTART, OWN_RUN), tmp_path, 12, 4, steps=6)))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tango_hpc.commands.cli", "train", str(file)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seconds of a generator step on " in done.stdout and "predicted and measured: " in done.stdout
    directory = RunDirectory(tmp_path / "run")
    phases = json.loads(directory.expected.read_text())["phases"]
    compared = [one for one in phases if max(one["predicted"], one["measured"]) >= LEAST_SECONDS]
    assert {(one["role"], one["phase"]) for one in compared} >= {("generator", "verify"), ("verifier", "train")}
    for one in compared:
        assert 0.5 <= one["predicted"] / one["measured"] <= 2, compared
    write_report(directory)
    assert "Seconds of a step, predicted and measured" in directory.report.read_text()
