"""The commands of the page on a task of one's own, typed as they stand there, on models that take seconds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tests.helpers.own_task import PAGE, write_what_the_page_shows
from tests.helpers.runs import ROOT, SMALL


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    write_what_the_page_shows(tmp_path)
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line) for line in block.splitlines() if line.startswith("tango ")]
    assert [words[1] for words in commands] == ["sft", "train", "rollouts"]
    small = [setting for setting in SMALL if "last_letter" not in setting] + ["task.settings={rows: 64}"]
    outputs = []
    for _, stage, *words in commands:
        settings = small if stage in ("sft", "train") else []
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tango_hpc.commands.cli", stage, *words, *settings],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    run = RunDirectory(tmp_path / "runs/odd_digits")
    rows = read_metrics(run, "train")
    assert len(rows) == 6 and all(row["generator/not_graded"] == 0 for row in rows)
    assert run.report.is_file()
    assert re.search(r"gold answer \d", outputs[-1])
