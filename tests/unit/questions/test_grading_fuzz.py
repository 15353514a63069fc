"""No answer of a model ends anything, whatever the rule and whatever stands in it; nor does a gold answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tango_hpc.questions.grading import GradeItem, GradingPool
from tango_hpc.questions.grading.numbers import plain_number
from tango_hpc.questions.grading.rules import MAX_ANSWER_CHARACTERS, RULES, shortcut, table
from tango_hpc.questions.protocol.solution import find_answer, parse_solution
from tango_hpc.questions.protocol.verification import parse_verification

OPTIONS = {"label": {"labels": ["yes", "no"], "synonyms": {"true": "yes"}}, "math": {"several": True}}
QUICK = sorted(set(RULES) - {"math", "own", "own_steps"})
PIECES = [
    "1e999", "9" * 399, "-1e999", "1e-999", "1/0", "\\frac{1}{0}", "\\text{", "\\boxed{", "\\frac", "{", "}", "(", "[",
    "\\left.", "\\$", "$", "%", ",", ";", "1,234", "½", "٣", "²", "√", "\x00", "\ud800", "\u202e", "'", "1if 1else ", "-", "~",
    "{1:", "lambda:", "\\ ", "e9", "^{", "_", "and ", "<step>", "</step>", "<think>", "\\boxed{CORRECT}", "yes", "nan", "inf",
]  # fmt: skip
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))


@settings(max_examples=400, deadline=None)
@given(gold=texts, answer=texts, rule=st.sampled_from([*QUICK, "math"]))
@example(gold="1", answer="1e999", rule="table")
@example(gold="9" * 399, answer="1, 2", rule="table")
def test_no_quick_rule_raises(gold: str, answer: str, rule: str) -> None:
    verdict = shortcut(rule, gold, answer, OPTIONS.get(rule, {}))
    if rule != "math":
        assert verdict is RULES[rule](gold, answer, **OPTIONS.get(rule, {}))
        assert verdict is not None
    plain_number(answer)


@settings(max_examples=200, deadline=None)
@given(texts)
def test_no_text_of_a_model_breaks_the_reading_of_it(text: str) -> None:
    solution = parse_solution(text)
    find_answer(solution)
    parse_verification(text, len(solution.steps))


def test_numbers_beyond_a_float_are_graded() -> None:
    assert table("1e999", "1e999") and table("9" * 399, "9" * 399) and table("3, 1e400", "1e400, 3.0")
    assert not table("1e999", "1e998") and not table("1", "9" * 399)


@pytest.mark.parametrize("rule", QUICK)
def test_no_quick_rule_is_slow(rule: str) -> None:
    """Within the length that is graded at all, time grows no faster than with the square; 4,000 characters took 6 s."""
    slowest = 0.0
    for piece in PIECES:
        answer = (piece * MAX_ANSWER_CHARACTERS)[: MAX_ANSWER_CHARACTERS - 1] + "x"
        started = time.process_time()
        shortcut(rule, "x", answer, OPTIONS.get(rule, {}))
        slowest = max(slowest, time.process_time() - started)
    assert slowest < 1.0


def test_a_rule_that_raises_is_decided_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gold: str, answer: str) -> bool:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setitem(RULES, "number", broken)  # in this process only
    with GradingPool(1) as pool:
        right, wrong = pool.grade([GradeItem("number", "2", "2.0"), GradeItem("number", "2", "3")])
    assert (right.correct, wrong.correct) == (True, False)
