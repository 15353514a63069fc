"""F1 of the verifier, against numbers counted by hand."""

from __future__ import annotations

import pytest

from tango_hpc.stages.verifier_scores import outcome_f1, step_f1


def test_f1_is_the_harmonic_mean_of_both_accuracies() -> None:
    # Right solutions: 1 of 2 found. Wrong ones: 3 of 4 found, the missing verdict counts as not found.
    correct = [True, True, False, False, False, False]
    verdicts = [1, 0, 0, 0, 0, -1]
    assert outcome_f1(correct, verdicts) == pytest.approx(2 * 0.5 * 0.75 / (0.5 + 0.75))


def test_a_verifier_that_always_says_the_same_scores_zero() -> None:
    assert outcome_f1([True, False, False], [0, 0, 0]) == 0.0
    assert outcome_f1([True, False, False], [1, 1, 1]) == 0.0
    assert outcome_f1([True, False], [-1, -1]) == 0.0


def test_f1_is_undefined_without_one_of_the_classes() -> None:
    assert outcome_f1([True, True], [1, 1]) is None
    assert outcome_f1([], []) is None


def test_steps_are_pooled_over_solutions() -> None:
    # Right steps: 2 of 3 found (one not judged); wrong steps: 1 of 1.
    assert step_f1([[1, -1], [1, 1]], [[1, -1], [0, 1]]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
