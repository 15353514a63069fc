"""Counts of a verifier's judgements, and scores made of them.

The positive class is "right": an item is a true positive where a right one is judged right, a false positive where a
wrong one is. An item without a judgement is neither judged right nor judged wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class JudgementCounts(NamedTuple):
    """Numbers of right and wrong items, and of the judgements on each kind."""

    num_right: int = 0
    num_wrong: int = 0
    right_judged_right: int = 0
    wrong_judged_right: int = 0
    wrong_judged_wrong: int = 0
    right_judged_wrong: int = 0

    @property
    def f1(self) -> float | None:
        """F1 as ProcessBench defines it: the harmonic mean of the accuracy on right and on wrong items.

        None where one of the classes is empty: the number is then not defined. A verifier that always says the same
        scores 0.
        """
        if not self.num_right or not self.num_wrong:
            return None
        on_right, on_wrong = self.right_judged_right / self.num_right, self.wrong_judged_wrong / self.num_wrong
        return 2 * on_right * on_wrong / (on_right + on_wrong) if on_right + on_wrong else 0.0

    @property
    def pr_f1(self) -> float | None:
        """F1 as the authors plot it: the harmonic mean of precision and recall of the judgement "right".

        None where no item is right. A verifier that always says "right" scores 2p / (p + 1) where the share p is.
        """
        if not self.num_right:
            return None
        return 2 * self.right_judged_right / (self.num_right + self.right_judged_right + self.wrong_judged_right)

    @property
    def same_share(self) -> float | None:
        """Of all judgements the share of the one that is given most often; None where there are none."""
        right = self.right_judged_right + self.wrong_judged_right
        wrong = self.right_judged_wrong + self.wrong_judged_wrong
        return max(right, wrong) / (right + wrong) if right + wrong else None

    @property
    def j(self) -> float | None:
        """Youden's J: the true-positive rate less the false-positive rate; None where one of the classes is empty.

        Rewards from such judgements teach the right while J is above 0, nothing at 0, and the wrong below
        (arXiv 2601.04411). A verifier that always says the same has 0.
        """
        if not self.num_right or not self.num_wrong:
            return None
        return self.right_judged_right / self.num_right - self.wrong_judged_right / self.num_wrong


def outcome_counts(correct_N: Iterable[bool], verdicts_N: Iterable[int]) -> JudgementCounts:
    """Count final verdicts (1 right, 0 wrong, -1 missing) on solutions that are right or wrong."""
    return _counts(
        (correct, {1: 1, 0: -1}.get(verdict, 0)) for correct, verdict in zip(correct_N, verdicts_N, strict=True)
    )


def step_counts(labels_N_K: Iterable[Iterable[int]], judgements_N_K: Iterable[Iterable[int]]) -> JudgementCounts:
    """Count step judgements (+1, -1, 0 missing) on steps with gold labels (+1 right, -1 wrong)."""
    return _counts(
        (label == 1, judgement)
        for labels_K, judgements_K in zip(labels_N_K, judgements_N_K, strict=True)
        for label, judgement in zip(labels_K, judgements_K, strict=True)
    )


def _counts(items: Iterable[tuple[bool, int]]) -> JudgementCounts:
    """Count (truly right, judgement) pairs, +1, -1 and 0 for a missing judgement."""
    pairs = list(items)
    return JudgementCounts(
        num_right=sum(is_right for is_right, _ in pairs),
        num_wrong=sum(not is_right for is_right, _ in pairs),
        right_judged_right=sum(is_right and judgement == 1 for is_right, judgement in pairs),
        wrong_judged_right=sum(not is_right and judgement == 1 for is_right, judgement in pairs),
        wrong_judged_wrong=sum(not is_right and judgement == -1 for is_right, judgement in pairs),
        right_judged_wrong=sum(is_right and judgement == -1 for is_right, judgement in pairs),
    )


class RecentVerdicts:
    """The counts of verdicts in the last `WINDOW` training steps, of both roles: one step of few questions says
    little.
    """

    WINDOW = 5

    def __init__(self) -> None:
        self._recent: deque[JudgementCounts] = deque(maxlen=self.WINDOW)

    def add(self, counts: JudgementCounts) -> None:
        """Take in a step."""
        self._recent.append(counts)

    @property
    def is_full(self) -> bool:
        """Return whether there were as many steps as it looks back on."""
        return len(self._recent) == self.WINDOW

    def pooled(self, newest: JudgementCounts | None = None) -> JudgementCounts:
        """Return the counts of these steps together; with `newest` as that of the last one, which is not taken in."""
        steps = [*self._recent, *([] if newest is None else [newest])][-self.WINDOW :]
        return JudgementCounts(*map(sum, zip(*steps, strict=True)))

    def state_dict(self) -> list[list[int]]:
        """Return the counts of each step; JSON."""
        return [*map(list, self._recent)]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        """Go on from `state_dict`."""
        self._recent = deque((JudgementCounts(*counts) for counts in state), maxlen=self.WINDOW)
