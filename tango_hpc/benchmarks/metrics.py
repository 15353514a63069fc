"""Numbers of an evaluation from the verdicts on its answers, each with a 95% confidence interval. Pure Python and numpy.

Shape legend: Q questions, S samples of each question, R resamples of N items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Share of hits with Wilson's interval, which stays sensible near 0 and 1 and for few questions."""
    count = len(hits)
    value = sum(hits) / count
    centre = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(value * (1 - value) / count + _Z**2 / (4 * count**2))
    return Estimate(value, max(0.0, centre - half), min(1.0, centre + half), count)


def mean(values_Q: Sequence[float]) -> Estimate:
    """Mean over questions with the percentile bootstrap's interval."""
    return mean_of_means([values_Q])


def mean_of_means(groups: Sequence[Sequence[float]]) -> Estimate:
    """Unweighted mean of the sets' means, as the paper averages its benchmarks; each set is resampled by itself."""
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    rng = np.random.default_rng(0)
    means = [array[rng.integers(len(array), size=(_RESAMPLES, len(array)))].mean(axis=1) for array in arrays]
    low, high = np.percentile(np.mean(means, axis=0), [2.5, 97.5])
    value = float(np.mean([array.mean() for array in arrays]))
    return Estimate(value, float(low), float(high), sum(map(len, arrays)))


def harmonic_mean_f1(*sets: tuple[Sequence[bool], Sequence[bool]]) -> Estimate | None:
    """ProcessBench's F1, the harmonic mean of the accuracies on right and on wrong items, averaged over `sets`.

    Each set is (is the item right, was it judged correctly), and is resampled by itself. None if any set lacks one
    of the two classes.
    """
    arrays = [(np.asarray(is_right, dtype=bool), np.asarray(hits, dtype=bool)) for is_right, hits in sets]
    if not arrays or any(is_right.all() or not is_right.any() for is_right, _ in arrays):
        return None
    rng = np.random.default_rng(0)
    resampled = np.zeros(_RESAMPLES)
    for is_right, hits in arrays:
        picked = rng.integers(len(hits), size=(_RESAMPLES, len(hits)))
        resampled += _f1(is_right[picked], hits[picked]) / len(arrays)
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    value = float(np.mean([_f1(is_right[None], hits[None])[0] for is_right, hits in arrays]))
    return Estimate(value, float(low), float(high), sum(len(hits) for _, hits in arrays))


def _f1(is_right_RN: np.ndarray, hits_RN: np.ndarray) -> np.ndarray:
    """F1 of each of R rows of N items; nan where a row has one class only."""
    with np.errstate(invalid="ignore"):
        on_right, on_wrong = (
            (hits_RN & chosen_RN).sum(axis=1) / chosen_RN.sum(axis=1) for chosen_RN in (is_right_RN, ~is_right_RN)
        )
        f1 = 2 * on_right * on_wrong / (on_right + on_wrong)
    return np.where(on_right + on_wrong == 0, 0.0, f1)


def pass_at_k(correct_S: Sequence[bool], k: int) -> float:
    """Chance that k of the S samples, drawn without replacement, hold a right one (Chen et al. 2021)."""
    num_wrong, total = list(correct_S).count(False), len(correct_S)
    assert 1 <= k <= total, f"pass@{k} of {total} samples"
    return 1.0 - math.comb(num_wrong, k) / math.comb(total, k)


def majority_vote(clusters_S: Sequence[int], weights_S: Sequence[float] | None = None) -> int | None:
    """The sample whose answer wins the vote: the first of the heaviest cluster; None where no sample has an answer.

    clusters_S: equal answers share a number, -1 is no answer. weights_S: of each vote, by default 1. Of equally
    heavy clusters the one that appeared first wins.
    """
    totals: dict[int, float] = {}
    for index, cluster in enumerate(clusters_S):
        if cluster >= 0:
            totals[cluster] = totals.get(cluster, 0.0) + (weights_S[index] if weights_S is not None else 1.0)
    if not totals:
        return None
    winner = max(totals, key=lambda cluster: totals[cluster])  # the first of equals: insertion order
    return list(clusters_S).index(winner)


def best_of(scores_S: Sequence[float]) -> int:
    """The sample with the highest score, the first of equals."""
    return max(range(len(scores_S)), key=lambda index: scores_S[index])
