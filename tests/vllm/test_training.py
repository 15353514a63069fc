"""Algorithm 1 with real trainers and engines on two ranks: an interrupted run computes what an uninterrupted one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.config import Config
from tango_hpc.control.stop import StopSignal
from tango_hpc.data.tables import read_rows
from tango_hpc.errors import StoppedEarly
from tango_hpc.protocol.prompts import generator_prompt_ids
from tango_hpc.protocol.tokenizer import load_tokenizer
from tango_hpc.report.run_page import write_report
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.dumps import dumped_steps, read_rollouts
from tango_hpc.run.metrics import REQUIRED_KEYS, read_evaluations, read_metrics
from tango_hpc.run.summary import read_summary
from tango_hpc.stages.score import score_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import prepare_small_run

# Safe points in the order in which this schedule (v g g g v g) meets them; each attempt stops at the next of these.
STOPS = ("rollout", "verify", "between steps", "rollout")
TOO_LONG = "generator.max_prompt_tokens=15"  # for some of the questions


class StopAt(StopSignal):
    """Asks for a stop at the `count`-th safe point named `phase`."""

    def __init__(self, directory: RunDirectory, rank: int, phase: str | None, count: int = 1) -> None:
        super().__init__(directory, rank)
        self._at, self._left = phase, count

    def check(self, phase: str) -> bool:
        if phase == self._at:
            self._left -= 1
        self._received = "test" if self._at is not None and self._left <= 0 else None
        return super().check(phase)


def train_twice(folder: Path, straight: tuple[Config, RunDirectory], stopped: tuple[Config, RunDirectory]) -> None:
    import torch
    import torch.distributed as dist

    from tango_hpc.stages.tango import Tango

    def attempt(config: Config, directory: RunDirectory, stop: StopSignal) -> dict[str, torch.Tensor]:
        run = Tango(config, directory, stop)
        try:
            run.train()
        finally:
            for role in run.roles.values():
                role.engine.close()
        return {
            f"{name}.{parameter}": shard.detach().clone()
            for name, policy in run.policies.items()
            for parameter, shard in policy.named_shards().items()
        }

    rank = dist.get_rank()
    expected = attempt(*straight, StopAt(straight[1], rank, None))
    for phase in STOPS:
        with pytest.raises(StoppedEarly):
            attempt(*stopped, StopAt(stopped[1], rank, phase, count=2))
    resumed = attempt(*stopped, StopAt(stopped[1], rank, None))
    assert expected.keys() == resumed.keys()
    different = [name for name, shard in expected.items() if not torch.equal(shard, resumed[name])]
    assert not different, different


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Config, RunDirectory], tuple[Config, RunDirectory]]:
    """The same run, uninterrupted and stopped four times; their final weights were compared bit for bit."""
    folder = tmp_path_factory.mktemp("training runs")
    straight, stopped = (prepare_small_run(folder / name, TOO_LONG) for name in ("straight", "stopped"))
    run_ranks(train_twice, 2, folder, straight, stopped, timeout=240)
    return straight, stopped


def computed(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("seconds/") and key != "time"}


def test_a_run_stopped_inside_steps_and_between_them_computes_the_same(runs: Any) -> None:
    (_, straight), (_, stopped) = runs
    expected, resumed = read_metrics(straight), read_metrics(stopped)
    assert [row["role"][0] for row in expected] == list("vgggvg")
    assert [computed(row) for row in resumed] == [computed(row) for row in expected]
    assert [computed(row) for row in read_evaluations(stopped)] == [computed(row) for row in read_evaluations(straight)]
    assert read_summary(stopped)["stages"]["train"]["attempts"] == len(STOPS) + 1


def test_rows_keep_the_contract_and_the_engine_agrees_with_the_trainer(runs: Any) -> None:
    (_, directory), _ = runs
    for row in read_metrics(directory):
        assert set(REQUIRED_KEYS) <= row.keys()
        never_null = set(REQUIRED_KEYS) - {"alpha", "verifier/outcome_f1"}
        assert not [key for key in never_null if row[key] is None and not key.startswith("seconds/")]
        assert row["logprob_gap/mean_abs"] < 1e-4
        assert row["reshard/bytes_sent"] == row["reshard/bytes_minimum"]
    evaluations = {row["step"]: row for row in read_evaluations(directory)}
    assert list(evaluations) == [0, 1, 3, 6]
    # Only the generator learnt in steps 2 and 3, and the verifier still judges the same solutions.
    verifier_keys = [key for key in evaluations[1] if key.startswith("verifier/")]
    assert len(verifier_keys) == 8
    assert [evaluations[1][key] for key in verifier_keys] == [evaluations[3][key] for key in verifier_keys]
    summary = json.loads(directory.summary.read_text())
    assert summary["status"] == "done" and summary["generator"].keys() == {"accuracy_before", "accuracy_after"}


def test_questions_that_are_too_long_are_not_asked_but_counted_and_told(runs: Any) -> None:
    (config, directory), _ = runs
    tokenizer = load_tokenizer(config.generator.model.path)
    questions = [row["question"] for row in read_rows(config.data.train, ("question",))]
    too_long = {question for question in questions if len(generator_prompt_ids(question, tokenizer)) > 15}
    count = sum(question in too_long for question in questions)
    assert 0 < count < len(questions)
    rows = read_metrics(directory)
    assert {(row["data/too_long"], row["data/rows"]) for row in rows} == {(count, len(questions))}
    for step in dumped_steps(directory.rollouts)["generator"]:
        asked = read_rollouts(directory.rollout_file("generator", step))
        assert too_long.isdisjoint(row.question for row in asked) and max(len(row.prompt_ids) for row in asked) <= 15
    told = f"{count} of {len(questions)} training questions are not asked: their prompt is longer than"
    assert any(told in note for note in json.loads(directory.progress.read_text())["notes"])
    write_report(directory)
    assert f"{count} of {len(questions)} rows are too long" in directory.report.read_text()


def test_scoring_the_dumps_again_gives_the_same_rewards_and_advantages(runs: Any) -> None:
    (config, directory), _ = runs
    steps = dumped_steps(directory.rollouts)
    assert steps == {"verifier": [1, 5], "generator": [2, 3, 4, 6]}
    for role, numbers in steps.items():
        rows = read_rollouts(directory.rollout_file(role, numbers[0]))
        assert len(rows) == 8
        for old, new in zip(rows, score_rows(rows, config), strict=True):
            assert new.advantages == pytest.approx(old.advantages, abs=1e-6)
            assert (new.outcome_reward, new.reward) == (old.outcome_reward, pytest.approx(old.reward))
