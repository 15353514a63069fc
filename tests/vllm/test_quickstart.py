"""The README's first command as a user types it, on models that take seconds: start, Ctrl-C, resume, start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.base.run.summary import read_summary
from tests.helpers.runs import ROOT, SMALL

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv").is_dir(), reason="tools/quickstart.sh uses .venv, which tools/install.sh makes"
)


def quickstart(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "tools/quickstart.sh", f"run.dir={run_dir}", *SMALL, *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )


def finish(process: subprocess.Popen[str], timeout: float = 200) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def test_start_interrupt_resume_and_start_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "my run")
    process = quickstart(directory.path, "train.generator_steps=6")
    give_up = time.monotonic() + 150
    while len(read_metrics(directory, "train")) < 2 and time.monotonic() < give_up and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C: everyone gets it
    code, output = finish(process)
    assert code == 85, output
    assert "--resume" in output
    steps = len(read_metrics(directory, "train"))
    assert 2 <= steps < 8

    code, output = finish(quickstart(directory.path, "train.generator_steps=6", "--resume"))
    assert code == 0, output
    assert "sft in" in output and "is done already" in output
    assert str(directory.report) in output and "before" in output
    assert [row["step"] for row in read_metrics(directory, "train")] == list(range(1, 9))
    summary = read_summary(directory)
    assert summary["status"] == "done" and summary["stages"].keys() == {"sft", "train"}
    assert summary["stages"]["train"]["attempts"] == 2
    assert json.loads(directory.provenance.read_text())
    assert directory.report.stat().st_size > 10_000 and directory.report_curves.is_file()
    assert sorted(path.name for path in directory.tensorboard.iterdir()) == ["sft", "train"]

    code, output = finish(quickstart(directory.path, "train.generator_steps=6"))
    assert code == 2
    assert "already holds a run" in output and "--resume" in output and "Traceback" not in output
