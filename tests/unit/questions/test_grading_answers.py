"""984 pairs of gold answer and answer, each with the verdict a mathematician would give."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tango_hpc.questions.grading import GradeItem, GradingPool

PAIRS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pool():
    with GradingPool(2) as pool:
        yield pool


def test_there_are_enough_pairs_and_most_come_from_real_sets():
    from_sets = [pair for pair in PAIRS if pair["set"] != "written"]
    assert len(PAIRS) >= 900 and len(from_sets) >= 0.85 * len(PAIRS)
    verdicts = Counter(pair["right"] for pair in PAIRS)
    assert min(verdicts.values()) > 0.45 * len(PAIRS)


def test_every_pair_gets_its_verdict(pool):
    items = [GradeItem(pair["rule"], pair["gold"], pair["answer"], pair.get("options", {})) for pair in PAIRS]
    verdicts = pool.grade(items)
    wrong = [
        f"{pair['set']}: {pair['answer']!r} for {pair['gold']!r} should be {'right' if pair['right'] else 'wrong'}"
        for pair, verdict in zip(PAIRS, verdicts, strict=True)
        if verdict.correct != pair["right"] or verdict.outcome != "graded"
    ]
    assert not wrong, "\n".join(wrong)


def test_a_right_answer_stays_right_in_every_dress(pool):
    r"""Delimiters, boxes, spacing commands and a full stop never change a verdict."""
    dresses = ["${}$", r"\({}\)", r"\boxed{{{}}}", r"\,{}\,", "{}.", r"\displaystyle {}", r"  {}  "]
    chosen = [pair for pair in PAIRS if pair["right"] and pair["rule"] == "math"][::9]
    items = [
        GradeItem("math", pair["gold"], dress.format(pair["answer"]), pair.get("options", {}))
        for pair in chosen
        for dress in dresses
    ]
    wrong = [item for item, verdict in zip(items, pool.grade(items), strict=True) if not verdict.correct]
    assert not wrong


def test_verdicts_do_not_depend_on_order_or_on_the_number_of_workers(pool):
    items = [GradeItem(pair["rule"], pair["gold"], pair["answer"], pair.get("options", {})) for pair in PAIRS[::4]]
    with GradingPool(1) as single:
        backwards = single.grade(items[::-1])[::-1]
    assert backwards == pool.grade(items)


DATA = Path(__file__).parents[2] / "data"
PEERS = [json.loads(line) for line in (DATA / "peer_answers.jsonl").read_text().splitlines()[1:]]
FORMS = [json.loads(line) for line in (DATA / "written_forms.jsonl").read_text().splitlines()]


def test_peers_own_tests_get_their_verdicts_or_a_reason(pool):
    """Each disagreement has its reason in the file; a reason that is no longer needed is a fault too."""
    verdicts = pool.grade([GradeItem(pair["rule"], pair["gold"], pair["answer"], {}) for pair in PEERS])
    for pair, verdict in zip(PEERS, verdicts, strict=True):
        assert (verdict.correct != pair["theirs"]) == ("why_not" in pair), pair
    assert len(PEERS) == 297 and sum("why_not" in pair for pair in PEERS) == 40


def test_the_forms_in_which_answers_are_written(pool):
    """Beside each form that counts stands its neighbour that must not."""
    verdicts = pool.grade([GradeItem(pair["rule"], pair["gold"], pair["answer"], {}) for pair in FORMS])
    wrong = [pair for pair, verdict in zip(FORMS, verdicts, strict=True) if verdict.correct != pair["right"]]
    assert not wrong


def test_the_page_has_the_agreement_of_the_file():
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    lists = {
        "Math-Verify, tests": ("Math-Verify test_",), "Math-Verify, issues": ("Math-Verify#",), "PRIME": ("PRIME",),
        "Open-R1, DeepScaleR, verl": ("open-r1", "DeepScaleR", "verl"), "lm-evaluation-harness, GSM8K": ("lm-eval",),
    }  # fmt: skip
    for name, prefixes in lists.items():
        pairs = [pair for pair in PEERS if pair["test"].startswith(prefixes)]
        agree = sum("why_not" not in pair for pair in pairs)
        assert f"| {name} | {agree} of {len(pairs)}" in page
