"""A sample of the fault matrix; `python -m tests.faults` runs all of it (docs/promises.md)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.__main__ import BEGIN, END, table
from tests.faults.cells import CELLS, FAULTS, NEEDS_ROOT, POINTS, Cell
from tests.faults.matrix import Result, read_results

ROOT = Path(__file__).parents[2]
SAMPLE = [
    Cell("SIGKILL", "update"),
    Cell("flipped byte", "save"),
    Cell("read-only directory", "rollout"),
    Cell("out of memory", "verification"),
]


# Of runs that train adapters, whose weights are made again from what was saved.
WITH_ADAPTERS = [Cell("SIGKILL", "weight sync"), Cell("flipped byte", "save")]


@pytest.mark.timeout(900)  # each attempt has a limit of its own
@pytest.mark.parametrize(("sample", "options"), [(SAMPLE, []), (WITH_ADAPTERS, ["--adapters"])])
def test_the_sample_is_as_it_must_be(sample: list[Cell], options: list[str]) -> None:
    cells = [cell for cell in sample if os.geteuid() == 0 or cell.fault not in NEEDS_ROOT]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:  # paths of sockets must be short
        words = [sys.executable, "-P", "-m", "tests.faults", "--folder", folder, "--cells"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        asked = [f"{cell.fault}/{cell.phase}" for cell in cells]
        done = subprocess.run([*words, *asked, *options], env=environment, capture_output=True, text=True, check=False)
        results = read_results(Path(folder) / "results.jsonl")
    assert {cell: result.problem for cell, result in results.items()} == dict.fromkeys(cells, ""), (
        done.stdout + done.stderr
    )
    assert done.returncode == 0


def test_the_page_shows_the_cells_that_were_run_and_no_bad_one() -> None:
    text = (ROOT / "docs/promises.md").read_text()
    rows = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(FAULTS)
    cells = [entry.strip() for row in rows for entry in row.split("|")[2:-1]]
    assert len(cells) == len(CELLS) == len(FAULTS) * len(POINTS)
    assert sum(map(bool, cells)) >= 40 and not [entry for entry in cells if entry.startswith("**")]


def test_a_cell_that_is_not_as_it_must_be_stands_out() -> None:
    cell = CELLS[0]
    shown = table({cell: Result(cell.fault, cell.phase, "it was not told")})
    assert "| SIGKILL | **it was not told** |  |" in shown
    assert "| power cut, 3 s + 4 s |" in table({cell: Result(cell.fault, cell.phase, "", -9, 3.0, 4.0)})


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_cell_expects_a_message(cell: Cell) -> None:
    assert cell.expected.code in (0, 1, 78, 85, -9) and len(cell.expected.message) > 30
