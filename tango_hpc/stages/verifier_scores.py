"""How well a verifier judges: numbers that a verifier which always says the same cannot win."""

from __future__ import annotations

from collections.abc import Iterable


def harmonic_f1(judgements: Iterable[tuple[bool, bool]]) -> float | None:
    """F1 as ProcessBench defines it: the harmonic mean of the accuracy on right and on wrong items.

    `judgements` holds (truly right, judged correctly) pairs; a missing judgement counts as judged incorrectly. None
    where one of the classes is empty: the number is then not defined. A verifier that always says the same scores 0.
    """
    counts = {True: [0, 0], False: [0, 0]}
    for is_right, judged_correctly in judgements:
        counts[is_right][0] += judged_correctly
        counts[is_right][1] += 1
    if not counts[True][1] or not counts[False][1]:
        return None
    on_right, on_wrong = (hits / total for hits, total in (counts[True], counts[False]))
    return 2 * on_right * on_wrong / (on_right + on_wrong) if on_right + on_wrong else 0.0


def outcome_f1(correct_N: Iterable[bool], verdicts_N: Iterable[int]) -> float | None:
    """`harmonic_f1` of final verdicts (1 right, 0 wrong, -1 missing) on solutions that are right or wrong."""
    return harmonic_f1(
        (correct, verdict == int(correct)) for correct, verdict in zip(correct_N, verdicts_N, strict=True)
    )


def step_f1(labels_N_K: Iterable[Iterable[int]], judgements_N_K: Iterable[Iterable[int]]) -> float | None:
    """`harmonic_f1` of step judgements (+1, -1, 0 missing) on steps with gold labels (+1 right, -1 wrong)."""
    return harmonic_f1(
        (label == 1, label == judgement)
        for labels_K, judgements_K in zip(labels_N_K, judgements_N_K, strict=True)
        for label, judgement in zip(labels_K, judgements_K, strict=True)
    )
