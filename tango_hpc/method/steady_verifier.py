"""Keeping the verifier useful: when its judgements count, and which solutions it learns from.

Ours, not the paper's. Where nearly all solutions are of one kind, verifications of a group agree, so there is no
gradient but towards the kind that is common, and a verifier can end at one verdict for everything; its judgements then
push the generator the wrong way. Each function serves one setting, and each setting is off by default:
`algorithm.min_verifier_j`, `train.verifier_draws`.
"""

from __future__ import annotations

from collections.abc import Sequence


def gated_alpha(alpha: float, j: float | None, least: float | None) -> float:
    """Return the weight of step advantages: `alpha` where J of the verdicts is above `least`, else 0; `alpha` without
    `least`.

    None for `j`, which the solutions of one kind leave undefined, is no evidence that the verifier is of use: 0.
    """
    if least is None or (j is not None and j > least):
        return alpha
    return 0.0


def is_balanced(correct_N: Sequence[bool], count: int) -> bool:
    """Return whether there are enough of N solutions of either kind for `count` of them in balance."""
    num_right = sum(correct_N)
    return min(num_right, len(correct_N) - num_right) >= count // 2


def balanced(correct_N: Sequence[bool], count: int) -> list[int]:
    """Return which `count` of N solutions the verifier judges: as many right as wrong ones, as far as there are such.

    Of each kind those drawn first, in their order; of an odd number one wrong solution more.
    """
    places = {kind: [i for i, correct in enumerate(correct_N) if bool(correct) is kind] for kind in (True, False)}
    num_right, num_wrong = kept_of_each(len(places[True]), len(places[False]), count)
    return sorted(places[True][:num_right] + places[False][:num_wrong])


def kept_of_each(num_right: int, num_wrong: int, num_kept: int) -> tuple[int, int]:
    """Return how many right and how many wrong solutions stay: `num_kept` together, as equal in number as there are
    such.

    Of an odd number the wrong ones have one more, as in the paper.
    """
    num_kept = min(num_kept, num_right + num_wrong)
    kept_right = min(max(num_kept // 2, num_kept - num_wrong), num_right)
    return kept_right, num_kept - kept_right
