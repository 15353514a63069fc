"""The documented script of the whole pipeline, run as a user runs it: prepare, teacher, SFT, Tango, eval, report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from tango_hpc.benchmarks.records import read_answers
from tango_hpc.protocol.solution import parse_solution
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.metrics import read_metrics
from tango_hpc.run.summary import read_summary

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script leaves behind, with this interpreter's package as the `tango` on the PATH."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = folder / "bin/tango"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tango_hpc.cli "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": path}
    script = ["bash", str(ROOT / "tools/pipeline.sh"), str(folder / "out")]
    done = subprocess.run(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return folder / "out"


@pytest.mark.timeout(900)
def test_the_teacher_keeps_what_is_right(folder: Path) -> None:
    report = json.loads((folder / "teacher/report.json").read_text())
    assert report["questions"] == 256
    assert report["right"] == report["train"] + report["test"] >= 64
    rows = pq.read_table(folder / "teacher/train.parquet").to_pylist()
    assert len(rows) == report["train"]
    for row in rows:
        letters = "".join(word[-1] for word in row["question"].split())
        solution = parse_solution(row["solution_text"])
        assert solution.well_formed and solution.answer == letters


def test_both_models_are_trained_after_it(folder: Path) -> None:
    run = RunDirectory.open(folder / "tango")
    summary = read_summary(run)
    assert summary["status"] == "done" and summary["stages"].keys() == {"sft", "train"}
    rows = read_metrics(run, "train")
    assert [row["role"] for row in rows].count("generator") == 6
    assert run.report.is_file()


def test_the_last_checkpoint_is_evaluated_with_votes_and_the_verifiers_choice(folder: Path) -> None:
    results = json.loads((folder / "eval/eval/results.json").read_text())
    [(label, sets)] = results.items()
    assert label.startswith("step_")
    estimates = sets["task"]["estimates"]
    assert {"pass@1", "avg@4", "pass@4 of 4", "maj@4", "best of 4", "weighted vote@4"} <= estimates.keys()
    assert estimates["pass@1"]["value"] > 0.3
    answers = read_answers(folder / f"eval/eval/{label}/task.parquet")
    assert len(answers) == 64 * 5 and all(one.verdict is not None for one in answers)
    assert any(one.step_labels for one in answers)
    assert (folder / "eval/eval/answers.html").is_file()


def test_the_exported_generator_loads_in_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "models/trained")
    assert model.config.hidden_size == 128
