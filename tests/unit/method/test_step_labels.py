"""Labels of steps by trying, and their part in Eq. 8, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tango_hpc.base.config.schema import StepLabelsConfig
from tango_hpc.base.types import Generation
from tango_hpc.method.equations import ClassWeights
from tango_hpc.method.step_labels import agreement, labels_by_trying
from tango_hpc.questions.grading.pool import Verdict
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.stages.responses import ReadSolution, Response
from tango_hpc.stages.scoring import Moment, score_verifications
from tango_hpc.stages.trying import labelled, starts_of
from tests.helpers.advantages import for_verifier

QUESTION = {"id": "1", "question": "1 + 1", "answer": "2", "source": "math"}


@pytest.mark.parametrize(
    ("before", "after", "rule", "max_fall", "labels"),
    [
        (0.0, [0.5, 0.25, 0.0], "success", 0.0, [1, 1, -1]),
        (0.5, [0.5, 0.25, 0.0, 0.0, 0.5], "change", 0.0, [1, -1, -1, -1, 1]),
        (0.5, [0.5, 0.25, 0.0, 0.0, 0.5], "change", 0.25, [1, 1, 1, -1, 1]),
        (0.0, [0.0, 1.0], "change", 0.0, [-1, 1]),
    ],
)
def test_labels_follow_the_rule(
    before: float, after: list[float], rule: Any, max_fall: float, labels: list[int]
) -> None:
    assert labels_by_trying(before, after, rule, max_fall) == labels


def test_a_missing_judgement_agrees_with_nothing() -> None:
    assert agreement([1, -1, 0, 1], [1, 1, -1, 1]) == 0.5 and agreement([], []) == 0.0


def test_the_agreement_is_added_to_eq_8_with_its_weight() -> None:
    solution = parse_solution(r"<think><step>a</step><step>b</step></think><answer>\boxed{2}</answer>")
    text = (
        r"<step_verification><step>\boxed{CORRECT}</step><step>\boxed{INCORRECT}</step></step_verification>"
        r"<final_verification>\boxed{CORRECT}</final_verification>"
    )
    read = read_verification(text, solution, "authors")
    labels = [[1, -1], [1, 1], [-1, 1], []]
    scored = score_verifications(
        "aabb", [True] * 4, [read] * 4, [5] * 4, weights=ClassWeights(1.0, 1.0), gamma=0.0, hook=for_verifier(),
        moment=Moment(), labels_N_K=labels, label_weight=0.5,
    )  # fmt: skip
    assert scored.rewards_N.tolist() == [1.5, 1.25, 1.0, 1.0]


def solution(token_ids: list[int], ends: list[int], question: dict[str, Any] = QUESTION) -> ReadSolution:
    response = Response([7, 8], Generation(token_ids, [0.0] * len(token_ids), "stop"), "")
    return ReadSolution(question, "1 + 1", response, parse_solution(""), None, ends, Verdict(True))


def test_the_generator_goes_on_from_the_exact_tokens_of_a_step() -> None:
    read = [solution([1, 2], []), solution([1, 2, 3, 4], [1, 3]), solution([1], [0], {**QUESTION, "answer": None})]
    read += [solution([5, 6, 7], [1]), solution([9, 9], [0])]
    for rule, expected in (
        ("success", [(1, [1, 2]), (1, [1, 2, 3, 4]), (3, [5, 6])]),
        ("change", [(1, []), (1, [1, 2]), (1, [1, 2, 3, 4]), (3, []), (3, [5, 6])]),
    ):
        settings = StepLabelsConfig(rule=rule, solutions=2)  # type: ignore[arg-type]
        starts = starts_of(read, settings)
        assert [(start.place, start.prefix) for start in starts] == expected
        assert [start.is_whole for start in starts] == [prefix == [1, 2, 3, 4] for _, prefix in expected]
    start = starts_of(read, StepLabelsConfig())[0]
    assert start.continued(Generation([8, 9], [], "stop"), 4) == Generation([1, 2, 8, 9], [], "stop")
    assert start.continued(Generation([8, 9, 9], [], "stop"), 4) == Generation([1, 2, 8, 9], [], "length")
    assert labelled(starts_of(read, StepLabelsConfig()), [0.5, 0.0, 0.0, 1.0], StepLabelsConfig()) == {
        1: [1, -1],
        3: [-1],
        4: [1],
    }
