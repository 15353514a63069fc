"""The commands of the page on a method of one's own, typed as they stand there, on models that take seconds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tests.helpers.runs import ROOT, SMALL

# So that every step changes the weights, whatever the tiny models write.
QUICK = [
    *SMALL,
    "algorithm.entropy_coef=0.5",
    "generator.optimizer.learning_rate=0.01",
    "verifier.optimizer.learning_rate=0.01",
]
pytestmark = pytest.mark.timeout(600)
PAGE = (ROOT / "docs/your_own_method.md").read_text()


def tango(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tango_hpc.commands.cli", *words],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands were typed."""
    folder = tmp_path_factory.mktemp("own method")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, language in (("soft.py", "python"), ("soft.yaml", "yaml")):
        (text,) = re.findall(rf"`{name}`[^`]*?:\n\n```{language}\n(.*?)```", PAGE, re.DOTALL)
        (folder / name).write_text(text)
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("tango ")]
    assert [words[0] for words in commands] == ["sft", "train", "report"]
    for words in commands:
        done = tango(folder, *words, *(QUICK if words[0] != "report" else []))
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_loss_of_the_page_trains_and_its_statistics_are_metrics(folder: Path) -> None:
    run = RunDirectory(folder / "runs/soft")
    rows = read_metrics(run, "train")
    assert rows and all(0 < row["loss/weight"] < 1 < row["loss/largest_ratio"] for row in rows)
    assert all("loss/clip_share" not in row and row["correction/truncated_share"] >= 0 for row in rows)
    assert (run.method / "loss.py").read_text() == (folder / "soft.py").read_text()


def test_a_run_goes_on_by_its_copy_and_says_what_has_changed(folder: Path) -> None:
    run = RunDirectory(folder / "runs/soft")
    done_before, mine = len(read_metrics(run, "train")), (folder / "soft.py").read_text()
    longer = [*(one for one in QUICK if "generator_steps=" not in one), "train.generator_steps=5"]
    (folder / "soft.py").write_text("def loss(tokens, settings):\n    return 1 / 0, {}\n")
    done = tango(folder, "train", "soft.yaml", "--resume", *longer)
    (folder / "soft.py").write_text(mine)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(run, "train")
    assert len(rows) > done_before and all(0 < row["loss/weight"] < 1 for row in rows)
    logs = "".join(file.read_text() for file in run.logs.glob("*.log"))
    assert f"algorithm.loss: {folder / 'soft.py'} has changed or is gone; this run goes on by its copy" in logs
    assert (run.method / "loss.py").read_text() == mine


def test_a_mistake_ends_with_2_and_its_line_before_anything_is_made(folder: Path) -> None:
    (folder / "wrong.py").write_text((folder / "soft.py").read_text().replace('["temperature"]', '["temprature"]'))
    words = ["algorithm.loss.name=wrong.py", "run.dir=runs/wrong", *QUICK]
    done = tango(folder, "train", "soft.yaml", *words)
    assert done.returncode == 2
    assert f"{folder / 'wrong.py'}, line 7, in loss: KeyError: 'temprature'" in done.stderr
    assert not (folder / "runs/wrong/method").exists()
