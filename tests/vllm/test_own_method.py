"""The commands of the page on a method of one's own, typed as they stand there, on models that take seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import RolloutRow, dumped_steps, read_rollouts
from tango_hpc.base.run.metrics import read_metrics
from tests.helpers.runs import ROOT, SMALL

# So that every step changes the weights, whatever the tiny models write.
QUICK = [
    *SMALL,
    "algorithm.entropy_coef=0.5",
    "generator.optimizer.learning_rate=0.01",
    "verifier.optimizer.learning_rate=0.01",
]
PAGE = (ROOT / "docs/your_own_method.md").read_text()


def tango(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tango_hpc.commands.cli", *words],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


def commands() -> list[list[str]]:
    """The words of the page's commands, behind `tango`."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("tango ")]


def of_baseline() -> list[str]:
    """The words of the command that trains with other advantages, behind `tango train`."""
    (words,) = [words[1:] for words in commands() if "run.dir=runs/baseline" in words]
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands were typed."""
    folder = tmp_path_factory.mktemp("own method")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, language in (("soft.py", "python"), ("soft.yaml", "yaml"), ("baseline.py", "python")):
        (text,) = re.findall(rf"`{name}`[^`]*?:\n\n```{language}\n(.*?)```", PAGE, re.DOTALL)
        (folder / name).write_text(text)
    assert [words[0] for words in commands()] == ["sft", "train", "report", "train", "score"]
    for words in commands():
        if words[0] == "score":  # fewer steps here than on the page
            words[1] = str(max((folder / "runs/baseline/rollouts").glob("generator*")))
        done = tango(folder, *words, *(QUICK if words[0] in ("sft", "train") else []))
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_loss_of_the_page_trains_and_its_statistics_are_metrics(folder: Path) -> None:
    run = RunDirectory(folder / "runs/soft")
    rows = read_metrics(run, "train")
    assert rows and all(0 < row["loss/weight"] < 1 < row["loss/largest_ratio"] for row in rows)
    assert all("loss/clip_share" not in row and row["correction/truncated_share"] >= 0 for row in rows)
    assert (run.method / "loss.py").read_text() == (folder / "soft.py").read_text()


def check_states(run: RunDirectory) -> list[RolloutRow]:
    """The rows of the last generator step, whose state is the baseline over all steps before."""
    last = read_rollouts(run.rollout_file("generator", max(dumped_steps(run.rollouts)["generator"])))
    accuracy = [row["generator/accuracy"] for row in read_metrics(run, "train") if row["role"] == "generator"]
    baseline = accuracy[0]
    for value in accuracy[:-1]:
        baseline = 0.9 * baseline + 0.1 * value
    assert [json.loads(row.state or "")["baseline"] for row in last] == pytest.approx([baseline] * len(last))
    for row in last:
        assert row.advantages == pytest.approx([row.outcome_reward - baseline] * len(row.response_ids))
    return last


def test_the_advantages_of_the_page_have_a_state_that_goes_from_step_to_step(folder: Path) -> None:
    run = RunDirectory(folder / "runs/baseline")
    first = read_rollouts(run.rollout_file("generator", min(dumped_steps(run.rollouts)["generator"])))
    assert {row.state for row in first} == {None} and {row.algorithm for row in first} == {"baseline"}
    last = check_states(run)
    assert [row.advantages for row in read_rollouts(folder / "scored.parquet")] == [row.advantages for row in last]


def test_a_run_goes_on_by_its_copies_and_says_what_has_changed(folder: Path) -> None:
    """And by the state of the advantages, which lies in the checkpoint."""
    run = RunDirectory(folder / "runs/baseline")
    done_before, files = len(read_metrics(run, "train")), ("soft.py", "baseline.py")
    mine = {name: (folder / name).read_text() for name in files}
    longer = [*(one for one in QUICK if "generator_steps=" not in one), "train.generator_steps=6"]
    for name in files:
        (folder / name).write_text("1 / 0\n")
    done = tango(folder, "train", *of_baseline(), "--resume", *longer)
    for name in files:
        (folder / name).write_text(mine[name])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(run, "train")
    assert len(rows) > done_before and all("loss/weight" in row for row in rows)
    check_states(run)
    for step in sorted(dumped_steps(run.rollouts)["generator"])[1:]:  # the first one after the checkpoint too
        assert all(row.state is not None for row in read_rollouts(run.rollout_file("generator", step)))
    logs = "".join(file.read_text() for file in run.logs.glob("*.log"))
    for key, name in (("loss", "soft.py"), ("advantages.generator", "baseline.py")):
        assert f"algorithm.{key}: {folder / name} has changed or is gone; this run goes on by its copy" in logs
    assert (run.method / "loss.py").read_text() == mine["soft.py"]


def test_a_mistake_ends_with_2_and_its_line_before_anything_is_made(folder: Path) -> None:
    (folder / "wrong.py").write_text((folder / "soft.py").read_text().replace('["temperature"]', '["temprature"]'))
    words = ["algorithm.loss.name=wrong.py", "run.dir=runs/wrong", *QUICK]
    done = tango(folder, "train", "soft.yaml", *words)
    assert done.returncode == 2
    assert f"{folder / 'wrong.py'}, line 7, in loss: KeyError: 'temprature'" in done.stderr
    assert not (folder / "runs/wrong/method").exists()
