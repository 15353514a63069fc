"""Rates of this machine, measured by small runs, and a run that compares itself with what they predict.

How near the prediction comes is for a quiet machine: `python -m tools.bench.predicted`.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tango_hpc.base.config import load_config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.commands.measure_rates import TINY, measure_rates, small_run
from tango_hpc.questions.tasks.tiny import build_tiny_model
from tango_hpc.report.run_page import write_report
from tests.helpers.runs import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"
OWN_RUN = ["run.dir=/nowhere/run"]  # what lies in ./runs/quickstart must not count


def test_a_run_compares_itself_with_what_measured_rates_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says so after its tenth step: in the log, in expected.json and in the report."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shown = io.StringIO()
    monkeypatch.setattr("tango_hpc.commands.measure_rates.RUNS", ((TINY, 2, 4),))
    measure_rates(QUICKSTART, OWN_RUN, Console(file=shown, width=200))
    assert "Training reaches" in shown.getvalue() and "Kept in" in shown.getvalue()

    for seed, role in enumerate(("generator", "verifier")):
        build_tiny_model(tmp_path / role, TINY, seed)
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
    assert {(one["role"], one["phase"]) for one in phases} >= {("generator", "verify"), ("verifier", "train")}
    rows = read_metrics(directory, "train")[:10]
    for one in phases:
        counted = [row[f"seconds/{one['phase']}"] or 0.0 for row in rows if row["role"] == one["role"]][1:]
        assert one["measured"] == pytest.approx(statistics.fmean(counted)), one
        assert one["predicted"] > 0, one
    write_report(directory)
    assert "Seconds of a step, predicted and measured" in directory.report.read_text()
