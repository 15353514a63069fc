"""F1 and J of the verifier, against numbers counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.types import Generation
from tango_hpc.questions.grading.pool import Verdict
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.questions.tasks import get_task
from tango_hpc.questions.tasks.last_letter import solution_text, verification_text
from tango_hpc.stages.judgement_counts import JudgementCounts, outcome_counts, step_counts
from tango_hpc.stages.responses import NOT_ASKED, ReadSolution, ReadVerification, Response
from tango_hpc.stages.step_metrics import judging_metrics, verdict_counts, verification_metrics

WORDS = ["cat", "horse"]


def test_f1_is_the_harmonic_mean_of_both_accuracies() -> None:
    # Right solutions: 1 of 2 found. Wrong ones: 3 of 4 found, the missing verdict counts as not found.
    correct = [True, True, False, False, False, False]
    verdicts = [1, 0, 0, 0, 0, -1]
    assert outcome_counts(correct, verdicts).f1 == pytest.approx(2 * 0.5 * 0.75 / (0.5 + 0.75))


def test_a_verifier_that_always_says_the_same_scores_zero() -> None:
    assert outcome_counts([True, False, False], [0, 0, 0]).f1 == 0.0
    assert outcome_counts([True, False, False], [1, 1, 1]).f1 == 0.0
    assert outcome_counts([True, False], [-1, -1]).f1 == 0.0


def test_f1_is_undefined_without_one_of_the_classes() -> None:
    assert outcome_counts([True, True], [1, 1]).f1 is None
    assert outcome_counts([], []).f1 is None


def test_steps_are_pooled_over_solutions() -> None:
    # Right steps: 2 of 3 found (one not judged); wrong steps: 1 of 1.
    assert step_counts([[1, -1], [1, 1]], [[1, -1], [0, 1]]).f1 == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))


def test_precision_recall_f1_and_j_of_verdicts() -> None:
    # Right: 3 of 4 judged right, one not judged. Wrong: 1 of 4 judged right, 2 wrong, one not judged.
    counts = outcome_counts([True] * 4 + [False] * 4, [1, 1, 1, -1, 1, 0, 0, -1])
    assert counts == JudgementCounts(4, 4, 3, 1, 2, 0)
    assert counts.same_share == 4 / 6  # of six verdicts four say "right"
    assert counts.pr_f1 == pytest.approx(3 / 4)  # 3 of the 4 judged right are right; 3 of the 4 right ones were found
    assert counts.j == 3 / 4 - 1 / 4
    assert counts.f1 == pytest.approx(2 * (3 / 4) * (2 / 4) / (3 / 4 + 2 / 4))


def test_precision_recall_f1_and_j_of_steps() -> None:
    # Right steps: 1 of 3 judged right. Wrong ones: both judged right. Precision 1/3, recall 1/3.
    counts = step_counts([[1, -1], [1, 1, -1]], [[1, 1], [0, -1, 1]])
    assert counts.pr_f1 == pytest.approx(1 / 3)
    assert counts.j == pytest.approx(1 / 3 - 1)


def test_saying_right_to_all_looks_good_to_precision_and_recall_alone() -> None:
    counts = outcome_counts([True, True, True, False], [1, 1, 1, 1])
    assert counts.pr_f1 == pytest.approx(2 * 0.75 / 1.75)
    assert (counts.f1, counts.j) == (0.0, 0.0)
    silent = outcome_counts([True, False], [-1, -1])
    assert (silent.f1, silent.pr_f1, silent.j) == (0.0, 0.0, 0.0)


def test_scores_are_undefined_without_the_classes_that_they_need() -> None:
    all_right, all_wrong = outcome_counts([True], [1]), outcome_counts([False], [1])
    assert (all_right.f1, all_right.pr_f1, all_right.j) == (None, 1.0, None)
    assert (all_wrong.f1, all_wrong.pr_f1, all_wrong.j) == (None, None, None)


def read(letters: str, judgements: list[bool]) -> ReadVerification:
    """A solution of "cat horse" with these letters, and a verification of it whose verdict follows its judgements."""
    solution = parse_solution(solution_text(WORDS, letters))
    question = {"id": "1", "question": " ".join(WORDS), "answer": "te", "source": "last_letter"}
    judged = ReadSolution(question, "", Response([], NOT_ASKED, ""), solution, letters, [], Verdict(letters == "te"))
    text = verification_text(WORDS, letters, judgements)
    return ReadVerification(judged, Response([], NOT_ASKED, text), read_verification(text, solution, "authors"))


def test_what_a_row_of_metrics_says_of_the_verifier() -> None:
    # Solutions: right and called right, right and called wrong, wrong and called right, wrong and called wrong twice.
    read_N = [read("te", [True] * 2), read("te", [True, False]), read("ce", [True] * 2), read("ce", [False, True])]
    read_N += [read("th", [False, False])]
    metrics = judging_metrics(get_task(TaskConfig(name="last_letter")), read_N)
    assert metrics["verifier/outcome_pr_f1"] == pytest.approx(1 / 2)
    assert metrics["verifier/outcome_j"] == pytest.approx(1 / 2 - 1 / 3)
    assert metrics["verifier/outcome_f1"] == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    # Steps, each on its own: right are 2 + 2 + 1 + 1 + 1 = 7, judged right 2 + 1 + 1 + 1 + 0 = 5; of the 3 wrong ones
    # ("c" twice, "h") 1 is judged right, 2 wrong.
    assert metrics["verifier/step_pr_f1"] == pytest.approx(2 * 5 / (7 + 5 + 1))
    assert metrics["verifier/step_j"] == pytest.approx(5 / 7 - 1 / 3)
    assert metrics["verifier/step_f1"] == pytest.approx(2 * (5 / 7) * (2 / 3) / (5 / 7 + 2 / 3))


def test_solutions_that_the_verifier_was_not_asked_about_are_in_no_mean_of_a_step() -> None:
    """Half of the right solutions are too long for its prompt, and it judges the others perfectly."""
    task = get_task(TaskConfig(name="last_letter"))
    asked_N = [read("te", [True] * 2), read("ce", [False, True])]
    asked_N = [replace(one, response=Response([1], Generation([2, 3], [0.0, 0.0], "stop"), "")) for one in asked_N]
    unread = replace(read("te", [True] * 2), verification=read_verification("", asked_N[0].judged.solution, "authors"))
    assert not unread.response.was_asked and unread.verification.final == -1
    metrics = verification_metrics(task, [*asked_N, unread, unread])
    assert metrics == verification_metrics(task, asked_N) | {"verifier/prompts_too_long": 0.5}
    assert metrics["verifier/outcome_j"] == 1.0 and metrics["verifier/parse_failures"] == 0.0
    assert verdict_counts([*asked_N, unread]) == verdict_counts(asked_N) == outcome_counts([True, False], [1, 0])
    assert verification_metrics(task, [unread]) == {"verifier/prompts_too_long": 1.0}
    assert judging_metrics(task, [*asked_N, unread])["verifier/outcome_j"] == 0.5  # an evaluation counts it as a miss
