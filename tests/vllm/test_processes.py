"""Each stage has the processes that `tango plan` lists and no more; engines of both roles are cut in their own way."""

from __future__ import annotations

import pytest

from tango_hpc.base.config import Config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_evaluations, read_metrics
from tango_hpc.commands.plan_report import make_plan
from tests.helpers.attempts import Attempt, Ended, make_attempts
from tests.helpers.runs import prepare_small_run

ALONE = ("train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0")
# By name: the stage and what differs from the small run.
KINDS = {
    "both": ("train", ()),
    "cut in their own way": ("train", ("generator.rollout.tensor=2", "verifier.parallel.tensor=2")),
    "verifier frozen": ("train", ("verifier.trainable=false", "verifier.top_p=0.9", *ALONE)),
    "no verifier": ("train", ("verifier=null", "sft.verifier=null", *ALONE)),
    "several updates": ("train", ("train.updates_per_batch=2",)),
    "evaluation": ("eval", ("eval.benchmarks=[task]",)),
    "verifier's evaluation not wanted": ("eval", ("eval.benchmarks=[task]", "eval.use_verifier=false")),
    "teacher": ("teacher", ("teacher={questions: QUESTIONS, output: OUTPUT, num_shards: 2}",)),
    "fine-tuning": ("sft", ()),
}
Runs = dict[str, tuple[Config, RunDirectory, Ended]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every kind of run, to its end."""
    folder = tmp_path_factory.mktemp("kinds of runs")
    made, attempts = {}, []
    for name, (stage, changes) in KINDS.items():
        path = folder / name.replace("'", "")
        places = {"QUESTIONS": str(path / "data/train.parquet"), "OUTPUT": str(path / "teacher")}
        overrides = list(changes)
        for key, place in places.items():
            overrides = [change.replace(key, f"'{place}'") for change in overrides]
        made[name] = prepare_small_run(path, *overrides)
        attempts.append(Attempt(str(path), stage))
    ended = make_attempts(folder, attempts)
    return {name: (*made[name], task) for name, task in zip(KINDS, ended, strict=True)}


@pytest.mark.parametrize("name", KINDS)
def test_the_processes_are_those_of_the_plan(runs: Runs, name: str) -> None:
    config, _, ended = runs[name]
    stage, _ = KINDS[name]
    planned = make_plan(config, gpu_gb=80, node_gb=None)["processes"][stage]
    expected = sorted(f"{role}-{rank}" for role in planned["per_rank"] for rank in range(config.world_size))
    assert len(expected) == planned["per_node"]
    assert (ended.code, ended.processes) == (0, expected)


def test_weights_move_at_the_minimum_in_the_world_of_each_role(runs: Runs) -> None:
    for name in ("both", "cut in their own way"):
        rows = read_metrics(runs[name][1], "train")
        assert [row["reshard/bytes_sent"] for row in rows] == [row["reshard/bytes_minimum"] for row in rows]
    # TP=2 trainer and engine hold the same shards, so nothing moves; the verifier's engine holds all of the model.
    cut = read_metrics(runs["cut in their own way"][1], "train")
    moved = {row["step"]: row["reshard/bytes_sent"] for row in cut}
    assert moved[3] == 0 and moved[2] > 0


def test_how_engines_are_cut_changes_no_step(runs: Runs) -> None:
    both, cut = (read_metrics(runs[name][1], "train") for name in ("both", "cut in their own way"))
    for row, other in zip(both, cut, strict=True):
        assert other["logprob_gap/mean_abs"] < 1e-4
        for key in ("generator/accuracy", "generator/response_tokens", "verifier/response_tokens", "tokens/generated"):
            assert other[key] == row[key]
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], abs=1e-5)


def test_a_frozen_verifier_never_needs_its_weights_again(runs: Runs) -> None:
    rows = read_metrics(runs["verifier frozen"][1], "train")
    assert {row["role"] for row in rows} == {"generator"} and len(rows) == 4
    whole = rows[1]["reshard/bytes_sent"] + rows[1]["reshard/bytes_local"]
    assert all(row["reshard/bytes_sent"] + row["reshard/bytes_local"] == whole > 0 for row in rows)
    assert all(row["verifier/correct_share"] is not None for row in rows)


def test_two_updates_of_a_batch_are_two_optimizer_steps(runs: Runs) -> None:
    once, twice = (read_metrics(runs[name][1], "train") for name in ("both", "several updates"))
    assert [row["loss/clip_share"] for row in once] == [0.0] * len(once)
    assert all(row["loss/clip_share"] >= 0 for row in twice)
    assert twice[0]["tokens/trained"] == 2 * once[0]["tokens/trained"]


def test_without_a_verifier_there_is_nothing_of_one(runs: Runs) -> None:
    directory = runs["no verifier"][1]
    assert {row["seconds/verify"] for row in read_metrics(directory, "train")} == {None}
    assert not [key for row in read_evaluations(directory) for key in row if key.startswith("verifier/")]
