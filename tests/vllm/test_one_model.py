"""One model in both roles on two ranks: one process on each, one sync for solving and judging, one checkpoint."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import dumped_steps, read_rollouts
from tango_hpc.base.run.metrics import read_evaluations, read_metrics
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.stages.convert import export_run
from tango_hpc.stages.rescore import score_rows
from tests.helpers.attempts import Attempt, Ended, make_attempts
from tests.helpers.runs import ONE_MODEL, ROOT, SMALL, computed, prepare_small_run

SETTINGS = (
    *ONE_MODEL,
    "generator.optimizer.learning_rate=0.01",
    "train.verifier_learning_rate_scale=0.5",
    "train.updates_per_batch=2",
    "algorithm.kl_coef=0.01",
    "algorithm.entropy_coef=0.5",  # so that every step changes the weights, whatever the tiny model writes
)
# The first of each question's solutions, and a second one of one question; V of M verifications are those of the step.
JOINT = (
    *ONE_MODEL,
    "generator.optimizer.learning_rate=0.01",
    "algorithm.entropy_coef=0.5",
    "train.rollouts_per_question=3",
    "train.joint=true",
    "train.joint_solutions=5",
    "train.joint_weight=0.5",
    "train.verifier_steps_per_cycle=0",
    "train.updates_per_batch=2",
)
JOINT_STOPS = (("verify_2", 1), ("verify", 2), ("rollout", 1))
STOPS = (("verify", 1), ("between steps", 1), ("rollout", 1), ("verify", 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, RunDirectory], list[Ended]]:
    """The same run uninterrupted, stopped and killed, and with an engine that forgets; one with joint updates,
    uninterrupted and stopped; and how the attempts ended.
    """
    folder = tmp_path_factory.mktemp("one model")
    settings = dict.fromkeys(("straight", "stopped", "forgetful"), SETTINGS)
    settings |= dict.fromkeys(("joint straight", "joint stopped"), JOINT)
    runs = {name: prepare_small_run(folder / name, *given)[1] for name, given in settings.items()}
    path = {name: str(run.path) for name, run in runs.items()}
    attempts = [Attempt(path["straight"]), Attempt(path["forgetful"], forgetful=True)]
    attempts += [Attempt(path["stopped"], stop=stop) for stop in STOPS]
    attempts += [Attempt(path["stopped"], kill=(1, "generator", "train", 1)), Attempt(path["stopped"])]
    joint = [Attempt(path["joint straight"])]
    joint += [Attempt(path["joint stopped"], stop=stop) for stop in JOINT_STOPS]
    joint += [Attempt(path["joint stopped"])]
    ended = make_attempts(folder, attempts + joint)
    codes = [0, 0, *[85] * len(STOPS), 1, 0], [0, *[85] * len(JOINT_STOPS), 0]
    assert [task.code for task in ended] == [*codes[0], *codes[1]]
    return runs, ended


def weights_and_optimizer(run: RunDirectory) -> dict[str, bytes]:
    """The files of the last checkpoint that hold them."""
    folder = steps_in(run.checkpoints / "train")[-1][1]
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.distcp"))}


@pytest.mark.parametrize("name", ["stopped", "forgetful"])
def test_an_interrupted_run_computes_the_same(runs: tuple[dict[str, RunDirectory], list[Ended]], name: str) -> None:
    straight, other = runs[0]["straight"], runs[0][name]
    rows = read_metrics(straight)
    assert [row["role"][0] for row in rows] == list("vgggvg")
    assert [computed(row) for row in read_metrics(other)] == [computed(row) for row in rows]
    evaluations = [[computed(row) for row in read_evaluations(run)] for run in (straight, other)]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) > 2
    saved = weights_and_optimizer(straight)
    assert {name.partition("/")[0] for name in saved} == {"generator"}
    assert weights_and_optimizer(other) == saved


def test_joint_updates_train_on_both_kinds_and_are_resumed_in_mid_step(
    runs: tuple[dict[str, RunDirectory], list[Ended]],
) -> None:
    straight, stopped = runs[0]["joint straight"], runs[0]["joint stopped"]
    rows = read_metrics(straight)
    assert [row["role"][0] for row in rows] == list("vgggg")
    assert [computed(row) for row in read_metrics(stopped)] == [computed(row) for row in rows]
    assert weights_and_optimizer(stopped) == weights_and_optimizer(straight)
    for row in rows[1:]:
        assert (row["generator/trained_responses"], row["verifier/trained_responses"]) == (12, 15)
        solved, judged = (read_rollouts(straight.rollout_file(role, row["step"])) for role in ("generator", "verifier"))
        assert row["tokens/trained"] == 2 * sum(len(one.response_ids) for one in (*solved, *judged))
        # Three of each chosen solution, of which the first one is the verification that the solution got.
        chosen = [solved[i] for i in (0, 3, 6, 9, 1)]
        assert [one.solution_text for one in judged[::3]] == [one.solution_text for one in chosen]
        assert [one.response_text for one in judged[::3]] == [one.verification_text for one in chosen]
        rows_again = score_rows([*solved, *judged], load_config(straight.config))
        for again, one in zip(rows_again, (*solved, *judged), strict=True):
            assert again.advantages == pytest.approx(one.advantages, rel=1e-5)
        written = sum(len(one.response_ids) for one in (*solved, *judged))
        first = sum(len(one.response_ids) for one in judged[::3])
        assert row["tokens/generated"] > written - first  # and the verifications of all other solutions


def test_a_rank_has_one_process_and_both_roles_are_reported(
    runs: tuple[dict[str, RunDirectory], list[Ended]],
) -> None:
    run, ended = runs[0]["straight"], runs[1][0]
    assert {name for name in ended.processes if name.startswith(("generator", "verifier"))} == {
        "generator-0",
        "generator-1",
    }
    assert {role for role, steps in dumped_steps(run.rollouts).items() if steps} == {"generator", "verifier"}
    rates = {row["role"]: row["learning_rate"] for row in read_metrics(run)}
    assert rates == {"generator": 0.01, "verifier": 0.005}
    for row in read_metrics(run):
        assert "memory/generator_peak_bytes" in row and "memory/verifier_peak_bytes" not in row
        # One sync a step: what the second update of the step before left.
        assert row["reshard/bytes_minimum"] == read_metrics(run)[0]["reshard/bytes_minimum"]
    assert all({"generator/accuracy", "verifier/outcome_f1"} <= row.keys() for row in read_evaluations(run))


def test_the_verifier_is_exported_from_the_one_model(
    runs: tuple[dict[str, RunDirectory], list[Ended]], tmp_path: Path
) -> None:
    run = runs[0]["straight"].path
    for role in ("generator", "verifier"):
        export_run(run, role, tmp_path / role)
    contents = [(tmp_path / role / "model.safetensors").read_bytes() for role in ("generator", "verifier")]
    assert contents[0] == contents[1]


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/one_model.md").read_text(), re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line)[1:] for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    assert [words[0] for words in commands] == ["sft", "train", "export", "train"]
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tango_hpc.commands.cli", *words]
            + ([] if words[0] == "export" else [*SMALL, *ONE_MODEL, *words[2:]]),
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    losses = read_evaluations(RunDirectory(tmp_path / "runs/one_model"), "sft")
    assert losses and all({"generator/eval_loss", "verifier/eval_loss"} <= row.keys() for row in losses)
    assert (tmp_path / "models/both/model.safetensors").is_file()
    assert [row["role"][0] for row in read_metrics(RunDirectory(tmp_path / "runs/joint"))] == list("vgggg")
