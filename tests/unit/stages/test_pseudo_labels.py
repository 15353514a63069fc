"""Questions without an answer: graded by the majority of their solutions, or teaching nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tango_hpc.base.config import Config
from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.base.run.dumps import write_rollouts
from tango_hpc.base.types import Generation
from tango_hpc.method.equations import ClassWeightEma
from tango_hpc.questions.grading.pool import NO_MAJORITY, Verdict
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.questions.tasks import get_task
from tango_hpc.stages.pseudo_labels import grade_by_majority
from tango_hpc.stages.rescore import score_dump
from tango_hpc.stages.responses import ReadSolution, ReadVerification, Response
from tango_hpc.stages.scoring import Moment
from tango_hpc.stages.steps import GeneratorBatch, VerifierBatch
from tests.helpers.advantages import for_generator, for_verifier

KNOWN = {"id": "known", "question": "1 + 1", "answer": "2", "source": "math"}
VOTED = {"id": "voted", "question": "1 / 2", "answer": None, "source": "math"}
SPLIT = {"id": "split", "question": "1 / 3", "answer": None, "source": "math"}
# Three solutions of each: one right; two of three spellings of one answer; three different answers.
ANSWERS = {"known": ["2", "3", "4"], "voted": ["1/2", "0.5", "2"], "split": ["1", "2", "3"]}


class Alone:
    """The exchange of an only process."""

    size, number, is_first = 1, 0, True


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "task": {"name": "math"},
            "data": {"train": "unused", "eval": "unused"},
            "generator": {"model": {"path": "unused"}},
            "train": {"rollouts_per_question": 3, "questions_per_step": 3, "verifier_warmup_steps": 0}
            | {"verifier_steps_per_cycle": 0, "majority_share": 0.5},
        }
    )


def solutions(question: dict[str, Any]) -> list[ReadSolution]:
    texts = [rf"<think><step>{one}</step></think><answer>\boxed{{{one}}}</answer>" for one in ANSWERS[question["id"]]]
    read = [
        ReadSolution(question, question["question"], Response([1], Generation([2, 3], [0.0, 0.0], "stop"), text), parsed,
                     parsed.answer, [0])
        for text, parsed in ((text, parse_solution(text)) for text in texts)
    ]  # fmt: skip
    for place, one in enumerate(read):
        one.graded = Verdict(place == 0) if one.has_truth else NO_MAJORITY
    return read


def graded(config: Config, counts: list[bool] | None = None) -> list[ReadSolution]:
    """The nine solutions after the vote, in which those of VOTED that `counts` says have a voice."""
    groups = [solutions(question) for question in (KNOWN, VOTED, SPLIT)]
    all_of = [[True] * 3, counts or [True] * 3, [True] * 3]
    exchange: Any = Alone()
    grade_by_majority(groups, all_of, 0.5, get_task(config.task), exchange)
    return [read for group in groups for read in group]


def test_equal_answers_vote_together_and_known_ones_stay(config: Config) -> None:
    read = graded(config)
    assert [one.correct for one in read] == [True, False, False, True, True, False, False, False, False]
    assert [one.teaches for one in read] == [True] * 6 + [False] * 3
    assert [one.correct for one in graded(config, [False, False, True])][3:6] == [False, False, True]


def batch(config: Config) -> GeneratorBatch:
    return GeneratorBatch.score(graded(config), [], step=1, config=config, hook=for_generator(), moment=Moment())


def test_without_a_majority_nobody_learns_and_accuracy_is_of_known_answers(config: Config) -> None:
    given = batch(config)
    assert given.trained == [0, 1, 2, 3, 4, 5] and len(given.sequences()) == 6
    metrics = given.metrics(get_task(config.task))
    assert metrics["generator/accuracy"] == metrics["generator/trained_accuracy"] == pytest.approx(1 / 3)
    assert metrics["generator/agreement"] == pytest.approx(2 / 3)
    assert metrics["generator/without_majority"] == 0.5 and metrics["generator/not_graded"] == 0.0


def test_a_batch_of_such_questions_alone_has_no_advantages(config: Config) -> None:
    read = graded(config)[6:]
    given = GeneratorBatch.score(read, [], step=1, config=config, hook=for_generator(), moment=Moment())
    assert len(given.sequences()) == 3 and not any(np.any(one.advantages) for one in given.sequences())
    metrics = given.metrics(get_task(config.task))
    assert metrics["generator/accuracy"] is None and metrics["generator/agreement"] is None


def test_the_verifier_learns_from_majorities_and_its_scores_are_of_known_answers(config: Config) -> None:
    judged = graded(config)[::2]  # right, wrong; agrees; no majority twice
    texts = [r"<final_verification>\boxed{CORRECT}</final_verification>"] * 5
    read = [
        ReadVerification(one, one.response, read_verification(text, one.solution, "authors"))
        for one, text in zip(judged, texts, strict=True)
    ]
    given = VerifierBatch.score(
        read,
        range(5),
        ClassWeightEma(0.8),
        drawn=judged,
        step=1,
        hook=for_verifier(),
        moment=Moment(),
        settings=AlgorithmConfig(format_weight=0.0),
    )
    assert list(given.trained) == [0, 1, 2] and given.scored.rewards_N.tolist()[:3] == [1.0, 0.0, 1.0]
    counts = given.verdict_counts()
    assert (counts.num_right, counts.num_wrong) == (1, 1)


def test_a_dump_scored_again_keeps_the_majority_of_the_run(config: Config, tmp_path: Path) -> None:
    rows = batch(config).dump_rows()
    assert [row.solution_correct for row in rows][3:] == [True, True, False, None, None, None]
    write_rollouts(tmp_path / "in.parquet", rows)
    report = score_dump(tmp_path / "in.parquet", config, tmp_path / "out.parquet")
    assert (report.num_reread, report.max_reward_change, report.max_advantage_change) == (0, 0.0, 0.0)
