"""Which answer is the label of a question that has none: votes by hand."""

from __future__ import annotations

import pytest

from tango_hpc.method.majority import numbered_answers, winner


@pytest.mark.parametrize(
    ("answers", "counts", "least", "label"),
    [
        ([0, 0, 1, 2], [1, 1, 1, 1], 0.5, 0),
        ([0, 0, 1, 2], [1, 1, 1, 1], 0.51, None),  # two of four are too few
        ([0, 0, 1, 1], [1, 1, 1, 1], 0.0, None),  # a tie
        ([0, 0, 1, 1], [1, 1, 1, 0], 0.6, 0),  # of the three that count
        ([0, 0, 1, 1], [0, 0, 1, 0], 1.0, 1),
        ([0, 0, 1, 1], [0, 0, 0, 0], 0.0, None),
        ([None, None, None, 3], [1, 1, 1, 1], 0.25, 3),  # no answer is no label, and a vote for none
        ([None, None, None, 3], [1, 1, 1, 1], 0.3, None),
        ([None, None], [1, 1], 0.0, None),
    ],
)
def test_the_label_has_enough_votes_and_more_than_any_other(
    answers: list[int | None], counts: list[int], least: float, label: int | None
) -> None:
    assert winner(answers, [bool(one) for one in counts], least) == label


def test_answers_that_are_one_have_one_number() -> None:
    same = {("0.5", "1/2"), ("x", "y")}
    assert numbered_answers(["1/2", None, "0.5", "2", "1/2", "y"], same) == [0, None, 0, 1, 0, 2]
