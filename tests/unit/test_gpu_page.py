"""The page that `tools/gpu_check.sh` leaves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.gpu.page import Check, Figure, make_page

ROOT = Path(__file__).parents[2]


def test_figures_reasons_and_failures_stand_on_the_page() -> None:
    checks = [
        Check("a check", "passed", "", [Figure("speed", 12345.6, "tokens/s", "at least 100"), Figure("gap", 0.00123)]),
        Check("another", "skipped", "Skipped: needs 4 GPUs, here 1", []),
        Check("a third", "failed", "E  assert 1 == 2", [Figure("error", 2.0)]),
    ]
    page = make_page({"card": "none"}, checks)
    assert "1 passed, 1 failed, 1 not run." in page and "| card | none |" in page
    assert "| a check | passed | speed 12,346 tokens/s (at least 100); gap 0.00123 |" in page
    assert "| another | not run | needs 4 GPUs, here 1 |" in page
    assert "| a third | **FAILED** | error 2 |" in page and "assert 1 == 2" in page.partition("## a third")[2]


def test_a_rehearsal_leaves_a_page_that_says_so(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "tools/gpu_check.sh"), str(tmp_path / "out"), "-k", "attention and 14 or memory"]
    without_gpus = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], "HOME": os.environ["HOME"]}
    done = subprocess.run(command, env=without_gpus, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "this is a rehearsal on the CPU" in done.stdout
    page = (tmp_path / "out/gpu_check.md").read_text()
    assert "none: a rehearsal, whose figures are the CPU's" in page
    assert "[14-2-64] | passed | output: relative error 0.00" in page
    assert "does not grow over 50 cycles. | not run | needs a GPU; a CPU says nothing here |" in page
