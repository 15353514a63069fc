"""The page that `tools/gpu_check.sh` leaves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.gpu.page import make_page

ROOT = Path(__file__).parents[3]
CHECKS = {
    "tests/gpu/test_1_a.py::a": "Part 1: a",
    "tests/gpu/test_3_b.py::b": "Part 3: b",
    "tests/gpu/test_2_c.py::c": "Part 2: c",
}


def call(number: int, card: str = "H100") -> dict[str, Any]:
    return {"call": number, "machine": {"card": card}, "checks": CHECKS}


def end(number: int, check: int, outcome: str, reason: str = "", **values: float) -> dict[str, Any]:
    figures = [(what, value, "tokens/s" if value > 9 else "", "") for what, value in values.items()]
    return {
        "call": number, "end": list(CHECKS)[check], "outcome": outcome, "reason": reason, "figures": figures, "seconds": 7.0,
    }  # fmt: skip


def test_figures_reasons_and_failures_stand_on_the_page() -> None:
    ends = [
        end(1, 0, "passed", speed=12345.6, gap=0.00123),
        end(1, 1, "skipped", "Skipped: needs 4 GPUs, here 1"),
        end(1, 2, "failed", "E  assert 1 == 2", error=2.0),
    ]
    page = make_page([call(1), *ends])
    assert "1 passed, 1 failed, 1 not run.\n" in page and "| card | H100 |" in page
    assert "| Part 1: a | passed | speed 12,346 tokens/s; gap 0.00123 | 1 | 7 |" in page
    assert "| Part 3: b | not run | needs 4 GPUs, here 1 | 1 | 7 |" in page
    assert (
        "| Part 2: c | **FAILED** | error 2 | 1 | 7 |" in page and "assert 1 == 2" in page.partition("## Part 2: c")[2]
    )
    assert page.index("Part 1") < page.index("Part 2") < page.index("Part 3")


def test_the_page_has_the_last_result_of_every_call_on_this_card() -> None:
    other = [call(1, "a CPU"), end(1, 2, "passed")]
    page = make_page([*other, call(2), end(2, 0, "failed", "mended since"), call(3), end(3, 0, "passed", gap=1.0)])
    assert "1 passed, 0 failed, 0 not run, 2 left for a next call." in page and "mended since" not in page
    assert "| Part 1: a | passed | gap 1 | 3 | 7 |" in page and "| Part 2: c | left | | | |" in page


def test_a_rehearsal_leaves_a_page_that_says_so(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "tools/gpu_check.sh"), str(tmp_path / "out"), "-k", "attention and 14 or memory"]
    without_gpus = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], "HOME": os.environ["HOME"]}
    done = subprocess.run(command, env=without_gpus, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "this is a rehearsal on the CPU" in done.stdout
    page = (tmp_path / "out/gpu_check.md").read_text()
    assert "none: a rehearsal, whose figures are the CPU's" in page
    assert "[14-2-64-None] | passed | output: relative error 0.00" in page
    assert "does not grow over 50 cycles | not run | needs a GPU; a CPU says nothing here |" in page
