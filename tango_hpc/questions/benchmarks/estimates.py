"""Numbers of an evaluation from the verdicts on its answers, each with a 95% confidence interval. Pure Python and
numpy.

Shape suffixes: `base.types`; N items are one or several of a question.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # of a two-sided 95% interval
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value in [0, 1] with its 95% interval; `count` questions stand behind it."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def share(hits: Sequence[bool]) -> Estimate:
    """Return share of hits with Wilson's interval, which stays sensible near 0 and 1 and for few questions."""
    count = len(hits)
    value = sum(hits) / count
    centre = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(value * (1 - value) / count + _Z**2 / (4 * count**2))
    return Estimate(value, max(0.0, centre - half), min(1.0, centre + half), count)


def mean(values_Q: Sequence[float]) -> Estimate:
    """Return mean over questions with the percentile bootstrap's interval."""
    return mean_of_means([values_Q])


def mean_of_means(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return unweighted mean of the sets' means, as the paper averages its benchmarks; each set is resampled by
    itself.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    rng = np.random.default_rng(0)
    means = [array[rng.integers(len(array), size=(_RESAMPLES, len(array)))].mean(axis=1) for array in arrays]
    low, high = np.percentile(np.mean(means, axis=0), [2.5, 97.5])
    value = float(np.mean([array.mean() for array in arrays]))
    return Estimate(value, float(low), float(high), sum(map(len, arrays)))


def harmonic_mean_f1(*sets: Sequence[tuple[Hashable, bool, bool]]) -> Estimate | None:
    """Return ProcessBench's F1, the harmonic mean of the accuracies on right and wrong items, averaged over `sets`.

    Each item is (its question, is it right, was it judged correctly). Each set is resampled by itself, question by
    question with all their items, which are alike. None if any set lacks one of the two classes.
    """
    counts_of_sets = [_counts_of_questions(items) for items in sets]
    if not sets or any(not counts_Q4.sum(axis=0)[[0, 2]].all() for counts_Q4 in counts_of_sets):
        return None
    rng = np.random.default_rng(0)
    resampled = np.zeros(_RESAMPLES)
    for counts_Q4 in counts_of_sets:
        picked = rng.integers(len(counts_Q4), size=(_RESAMPLES, len(counts_Q4)))
        resampled += _f1(np.stack([column_Q[picked].sum(axis=1) for column_Q in counts_Q4.T], axis=1)) / len(sets)
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    value = float(np.mean([_f1(counts_Q4.sum(axis=0)[None])[0] for counts_Q4 in counts_of_sets]))
    return Estimate(value, float(low), float(high), sum(map(len, counts_of_sets)))


def _counts_of_questions(items: Sequence[tuple[Hashable, bool, bool]]) -> np.ndarray:
    """Return for each question: right items, those of them judged correctly; wrong items, those of them judged
    correctly.
    """
    counts: dict[Hashable, list[int]] = {}
    for question, is_right, hit in items:
        of_question = counts.setdefault(question, [0, 0, 0, 0])
        of_question[0 if is_right else 2] += 1
        of_question[1 if is_right else 3] += hit
    return np.array(list(counts.values()), dtype=np.int64).reshape(-1, 4)


def _f1(counts_B4: np.ndarray) -> np.ndarray:
    """Return F1 of each row of `_counts_of_questions`; nan where a row has one class only."""
    num_right_B, hits_on_right_B, num_wrong_B, hits_on_wrong_B = counts_B4.T
    with np.errstate(invalid="ignore"):
        on_right_B, on_wrong_B = hits_on_right_B / num_right_B, hits_on_wrong_B / num_wrong_B
        f1_B = 2 * on_right_B * on_wrong_B / (on_right_B + on_wrong_B)
    return np.where(on_right_B + on_wrong_B == 0, 0.0, f1_B)


def pass_at_k(correct_M: Sequence[bool], k: int) -> float:
    """Return the chance that k of S samples, drawn without replacement, hold a right one (Chen et al. 2021)."""
    num_wrong, total = list(correct_M).count(False), len(correct_M)
    assert 1 <= k <= total, f"pass@{k} of {total} samples"
    return 1.0 - math.comb(num_wrong, k) / math.comb(total, k)


def majority_vote(clusters_M: Sequence[int], weights_M: Sequence[float] | None = None) -> int | None:
    """Return the sample whose answer wins the vote: the first of the heaviest cluster; None where no sample has an
    answer.

    clusters_M: equal answers share a number, -1 is no answer. weights_M: of each vote, by default 1. Of equally
    heavy clusters the one that appeared first wins.
    """
    totals: dict[int, float] = {}
    for index, cluster in enumerate(clusters_M):
        if cluster >= 0:
            totals[cluster] = totals.get(cluster, 0.0) + (weights_M[index] if weights_M is not None else 1.0)
    if not totals:
        return None
    winner = max(totals, key=lambda cluster: totals[cluster])  # the first of equals: insertion order
    return list(clusters_M).index(winner)


def best_of(scores_M: Sequence[float]) -> int:
    """Return the sample with the highest score, the first of equals."""
    return max(range(len(scores_M)), key=lambda index: scores_M[index])
