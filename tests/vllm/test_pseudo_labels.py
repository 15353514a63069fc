"""Runs on questions of which half have no answer: majorities grade their solutions; resumed in the middle of a step."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.config import load_config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import dumped_steps, read_rollouts
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.stages.rescore import score_rows
from tests.helpers.attempts import Attempt, make_attempts
from tests.helpers.runs import computed, prepare_small_run

SETTINGS = (
    "train.majority_share=0.01",  # the models know nothing: few of their solutions have an answer at all
    "train.rollouts_per_question=4",
    "protocol.solution=free",
    "algorithm.entropy_coef=0.5",
    "generator.optimizer.learning_rate=0.01",
)
VERIFIED = (*SETTINGS, "train.verified_majority=true", "train.verifier_draws=2")
STOPS = {"plain": ("rollout", "verify"), "verified": ("verify", "verify_2", "verify_3")}
Runs = dict[str, dict[str, RunDirectory]]


def without_answers(file: Path) -> None:
    """Take the answer from every second question."""
    table = pq.read_table(file)
    answers = [None if row % 2 else answer for row, answer in enumerate(table["answer"].to_pylist())]
    place = table.column_names.index("answer")
    pq.write_table(table.set_column(place, "answer", pa.array(answers, pa.string())), file)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each kind of run uninterrupted and stopped."""
    folder = tmp_path_factory.mktemp("pseudo labels")
    made: Runs = {}
    attempts, codes = [], []
    for kind, settings in (("plain", SETTINGS), ("verified", VERIFIED)):
        made[kind] = {}
        for name in ("straight", "stopped"):
            config, made[kind][name] = prepare_small_run(folder / kind / name, *settings)
            without_answers(config.data.train)
        stopped = str(made[kind]["stopped"].path)
        attempts += [Attempt(str(made[kind]["straight"].path))]
        attempts += [*(Attempt(stopped, stop=(phase, 1)) for phase in STOPS[kind]), Attempt(stopped)]
        codes += [0, *[85] * len(STOPS[kind]), 0]
    assert [task.code for task in make_attempts(folder, attempts)] == codes
    return made


@pytest.mark.parametrize("kind", ["plain", "verified"])
def test_a_run_that_was_stopped_in_a_step_computes_the_same(runs: Runs, kind: str) -> None:
    straight, stopped = runs[kind]["straight"], runs[kind]["stopped"]
    rows = read_metrics(straight)
    assert [row["role"][0] for row in rows] == list("vgggvg")
    assert [computed(row) for row in read_metrics(stopped)] == [computed(row) for row in rows]


def test_majorities_grade_and_the_others_teach_nobody(runs: Runs) -> None:
    run = runs["plain"]["straight"]
    metrics = {row["step"]: row for row in read_metrics(run)}
    config, seen = load_config(run.config), set()
    for role, steps in dumped_steps(run.rollouts).items():
        for step in steps:
            rows = read_rollouts(run.rollout_file(role, step))
            for again, one in zip(score_rows(rows, config), rows, strict=True):
                assert again.advantages == pytest.approx(one.advantages, rel=1e-5)
            seen |= {(one.gold_answer is None, one.solution_correct) for one in rows}
            if role == "generator" and any(one.gold_answer is None for one in rows):
                learns = [one for one in rows if one.solution_correct is not None]
                assert metrics[step]["generator/trained_responses"] == len(learns)
                assert metrics[step]["generator/without_majority"] == pytest.approx(
                    sum(one.solution_correct is None for one in rows) / sum(one.gold_answer is None for one in rows)
                )
    assert {(True, True), (True, False), (True, None), (False, False)} <= seen
