"""One model in both roles on two ranks: one process on each, one sync for solving and judging, one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import dumped_steps
from tango_hpc.base.run.metrics import read_evaluations, read_metrics
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.stages.convert import export_run
from tests.helpers.attempts import Attempt, Ended, make_attempts
from tests.helpers.runs import ONE_MODEL, computed, prepare_small_run

SETTINGS = (
    *ONE_MODEL,
    "generator.optimizer.learning_rate=0.01",
    "train.verifier_learning_rate_scale=0.5",
    "train.updates_per_batch=2",
    "algorithm.kl_coef=0.01",
    "algorithm.entropy_coef=0.5",  # so that every step changes the weights, whatever the tiny model writes
)
STOPS = (("verify", 1), ("between steps", 1), ("rollout", 1), ("verify", 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, RunDirectory], list[Ended]]:
    """The same run uninterrupted, stopped and killed, and with an engine that forgets; and how the attempts ended."""
    folder = tmp_path_factory.mktemp("one model")
    runs = {name: prepare_small_run(folder / name, *SETTINGS)[1] for name in ("straight", "stopped", "forgetful")}
    path = {name: str(run.path) for name, run in runs.items()}
    attempts = [Attempt(path["straight"]), Attempt(path["forgetful"], forgetful=True)]
    attempts += [Attempt(path["stopped"], stop=stop) for stop in STOPS]
    attempts += [Attempt(path["stopped"], kill=(1, "generator", "train", 1)), Attempt(path["stopped"])]
    ended = make_attempts(folder, attempts)
    assert [task.code for task in ended] == [0, 0, *[85] * len(STOPS), 1, 0]
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
