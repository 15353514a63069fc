"""Pseudo-labels of questions without an answer: what most solutions of a question answer counts as right.

TTRL (arXiv 2504.16084) takes the most frequent answer for the right one. CoVerRL (arXiv 2603.17775) counts the answers
of those solutions alone that the verifier calls correct. Departure from both: an answer with too few votes, or with as
many as another one, is no label, and its question teaches nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def winner(answers_M: Sequence[int | None], counts_M: Sequence[bool], least_share: float) -> int | None:
    """Return the answer of M solutions that is the label; None where there is none.

    `answers_M` numbers the answers that are different; None is no answer. `counts_M`: whose vote counts. The label has
    at least `least_share` of all votes that count, those for no answer among them, and more than any other.
    """
    votes = Counter(answer for answer, counts in zip(answers_M, counts_M, strict=True) if counts)
    of_answers = [(count, answer) for answer, count in votes.items() if answer is not None]
    if not of_answers:
        return None
    best, label = max(of_answers)
    is_tie = sum(count == best for count, _ in of_answers) > 1
    return None if is_tie or best < least_share * votes.total() else label


def numbered_answers(answers_M: Sequence[str | None], same: set[tuple[str, str]]) -> list[int | None]:
    """Return a number for each answer, the same for those that are one: spelled alike, or a pair of `same`."""
    numbers: dict[str, int] = {}
    for answer in answers_M:
        if answer is not None and answer not in numbers:
            known = next((numbers[other] for other in numbers if {(answer, other), (other, answer)} & same), None)
            numbers[answer] = len(set(numbers.values())) if known is None else known
    return [None if answer is None else numbers[answer] for answer in answers_M]
