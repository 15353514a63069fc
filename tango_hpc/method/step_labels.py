"""Labels of steps by trying: a step is right where the generator still finds the right answer after it.

`success` is the hard label of Math-Shepherd (arXiv 2312.08935): some continuation from the end of the step is right.
`change` follows StepWiser (arXiv 2508.19229): a step is wrong that makes success less likely, or after which it stays
impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Rule = Literal["success", "change"]


def labels_by_trying(before: float, after_K: Sequence[float], rule: Rule, max_fall: float) -> list[int]:
    """Return the label of each of K steps, +1 right or -1 wrong, from shares of right continuations.

    `before`: the share before the first step, which `success` does not ask for. `after_K`: after each step. `max_fall`:
    how far the share may fall over a step that `change` calls right.
    """
    if rule == "success":
        return [1 if share > 0 else -1 for share in after_K]
    return [-1 if left - share > max_fall or left == share == 0 else 1 for left, share in pairwise([before, *after_K])]


def agreement(judgements_K: Sequence[int], labels_K: Sequence[int]) -> float:
    """Return the share of K steps whose judgement (+1, -1, 0 missing) is the label; 0 without steps."""
    hits = sum(judgement == label for judgement, label in zip(judgements_K, labels_K, strict=True))
    return hits / len(labels_K) if labels_K else 0.0
