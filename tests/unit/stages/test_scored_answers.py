"""A task that scores answers: Eq. 2 and 4 take the score, everything that is right or wrong the threshold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tango_hpc.base.config import Config
from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.base.run.dumps import read_rollouts, write_rollouts
from tango_hpc.base.types import Generation
from tango_hpc.method.equations import ClassWeightEma
from tango_hpc.questions.grading.pool import Verdict
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.questions.tasks import get_task
from tango_hpc.stages.rescore import score_dump
from tango_hpc.stages.responses import ReadSolution, ReadVerification, Response
from tango_hpc.stages.scoring import Moment
from tango_hpc.stages.steps import GeneratorBatch, VerifierBatch
from tests.helpers.advantages import for_generator, for_verifier

# Half a point for an answer within 2 of the right one, which is right enough.
NEAR = """
class Near:
    threshold = 0.5

    def grade(self, question, answer):
        distance = abs(int(answer) - int(question["answer"]))
        score = 1.0 if distance == 0 else 0.5 if distance < 3 else 0.2
        return score, {"distance": distance} if distance else {}
"""
ANSWERS, SCORES, RIGHT = [6, 7, 9, 6], [1.0, 0.5, 0.2, 1.0], [True, True, False, True]
NO_FORMAT = AlgorithmConfig(format_weight=0.0)
QUESTION = {"id": "1", "question": "3", "answer": "6", "source": "near"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "near.py").write_text(NEAR)
    unused: dict[str, Any] = {"model": {"path": "unused"}}
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "task": {"name": str(tmp_path / "near.py")},
            "data": {"train": "unused", "eval": "unused"},
            "generator": unused,
            "train": {"rollouts_per_question": 4, "questions_per_step": 1, "verifier_warmup_steps": 0}
            | {"verifier_steps_per_cycle": 0},
        }
    )


def solutions(config: Config) -> list[ReadSolution]:
    texts = [rf"<think><step>{one}</step></think><answer>\boxed{{{one}}}</answer>" for one in ANSWERS]
    read = [
        ReadSolution(QUESTION, "3", Response([1], Generation([2, 3], [0.0, 0.0], "stop"), text), parsed, parsed.answer, [0])
        for text, parsed in ((text, parse_solution(text)) for text in texts)
    ]  # fmt: skip
    verdicts = get_task(config.task).grade_all([(QUESTION, one.answer) for one in read])
    for one, verdict in zip(read, verdicts, strict=True):
        one.graded = verdict
    return read


def batch(config: Config) -> GeneratorBatch:
    return GeneratorBatch.score(solutions(config), [], step=1, config=config, hook=for_generator(), moment=Moment())


def test_rewards_and_advantages_are_those_of_the_score(config: Config) -> None:
    scored = batch(config).scored
    assert scored.rewards_N.tolist() == SCORES
    # mean 0.675; deviations 0.325, -0.175, -0.475, 0.325; their squares sum to 0.4675, over 3, the root 0.394757
    by_hand = np.array([0.325, -0.175, -0.475, 0.325]) / np.sqrt(0.4675 / 3)
    np.testing.assert_allclose([one[0] for one in scored.advantages_N_T], by_hand, rtol=1e-12)


def test_metrics_have_the_score_its_parts_and_the_accuracy_by_the_threshold(config: Config) -> None:
    metrics = batch(config).metrics(get_task(config.task))
    assert metrics["generator/accuracy"] == 0.75
    assert metrics["generator/score"] == pytest.approx(np.mean(SCORES))
    assert metrics["reward_parts/distance"] == 2.0  # of the two answers that have it: 1 and 3
    plain = solutions(config)
    for one in plain:
        one.graded = Verdict(one.correct)
    metrics = GeneratorBatch.score(plain, [], step=1, config=config, hook=for_generator(), moment=Moment()).metrics(
        get_task(config.task)
    )
    assert "generator/score" not in metrics and metrics["generator/outcome_reward"] == 0.75


def test_the_verifier_learns_right_and_wrong(config: Config) -> None:
    """Eq. 8 and the class weights: 3 right solutions, 1 wrong one."""
    judged = solutions(config)
    text = (
        r"<step_verification><step>\boxed{CORRECT}</step></step_verification>"
        r"<final_verification>\boxed{CORRECT}</final_verification>"
    )
    read = [
        ReadVerification(one, one.response, read_verification(text, one.solution, "authors")) for one in judged
    ]  # fmt: skip
    left_out = replace(for_verifier(), function=lambda batch, *_: ([None, *map(np.zeros, batch.lengths[1:])], None))
    for hook, trained in ((for_verifier(), 4), (left_out, 3)):
        given = VerifierBatch.score(
            read, range(4), ClassWeightEma(0.8), drawn=judged, step=1, hook=hook, moment=Moment(), settings=NO_FORMAT
        )
        assert given.metrics(get_task(config.task))["verifier/trained_responses"] == len(given.sequences()) == trained
    averages = ClassWeightEma(0.8)
    scored = VerifierBatch.score(
        read, range(4), averages, drawn=judged, step=1, hook=for_verifier(), moment=Moment(), settings=NO_FORMAT
    ).scored  # fmt: skip
    assert scored.rewards_N.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert (averages.average_right, averages.average_wrong) == (3, 1)


def test_a_dump_has_the_scores_and_scoring_it_again_gives_them_again(config: Config, tmp_path: Path) -> None:
    rows = batch(config).dump_rows()
    assert [row.score for row in rows] == SCORES and [row.solution_correct for row in rows] == RIGHT
    assert [json.loads(row.reward_parts or "{}") for row in rows] == [{}, {"distance": 1}, {"distance": 3}, {}]
    write_rollouts(tmp_path / "in.parquet", rows)
    report = score_dump(tmp_path / "in.parquet", config, tmp_path / "out.parquet")
    assert (report.num_reread, report.max_reward_change, report.max_advantage_change) == (0, 0.0, 0.0)
    again = read_rollouts(tmp_path / "out.parquet")
    np.testing.assert_allclose([row.score for row in again], SCORES, rtol=1e-6)
    assert [row.reward_parts for row in again] == [row.reward_parts for row in rows]
    (tmp_path / "near.py").write_text(NEAR.replace("else 0.5 if", "else 0.6 if"))
    assert score_dump(tmp_path / "in.parquet", config, tmp_path / "out.parquet").max_reward_change == pytest.approx(0.1)
