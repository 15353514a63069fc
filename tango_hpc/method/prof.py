"""PROF, the process consistency filter (arXiv 2509.03403): step scores choose the rollouts to learn from.

Instead of blending step advantages into Eq. 7, where a verifier that can be fooled is optimised against, PROF draws
more rollouts of a question than it trains on and keeps those whose steps are judged as their outcome is: right
solutions with many steps judged right, wrong ones with many judged wrong. What is kept is balanced between the two,
and learns from its outcome rewards alone. Switched on by `algorithm.prof_rollouts`, with `algorithm.alpha_start: 0`.

As in the paper's Algorithm 1 ("both" groups are filtered, by the mean over steps). Departures: no extra penalty on
solutions of one step or of many (its lambda, H_lambda); the scores are a verifier's judgements, +1 and -1, not a reward
model's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from tango_hpc.method.equations import FloatArray


def kept_rollouts(
    group_ids_N: Sequence[Hashable], correct_N: Sequence[bool], step_rewards_N_K: Sequence[FloatArray], num_kept: int
) -> NDArray[np.bool_]:
    """Return which of N solutions are trained on: of each group the `num_kept` that PROF chooses, or all if it has
    fewer.

    A solution's consistency is the mean judgement of its steps, which is the sum of its step rewards (Eq. 3), times +1
    if its answer is right and -1 if it is wrong; 0 for one without step rewards. Right and wrong solutions are ranked
    apart; of equals the first drawn come first. Shape (N,).
    """
    kept_N = np.zeros(len(group_ids_N), dtype=bool)
    consistency_N = [
        float(rewards_K.sum()) * (1 if correct else -1)
        for correct, rewards_K in zip(correct_N, step_rewards_N_K, strict=True)
    ]
    for group in dict.fromkeys(group_ids_N):
        members = [i for i, group_id in enumerate(group_ids_N) if group_id == group]
        ranked = sorted(members, key=lambda i: -consistency_N[i])  # stable
        right, wrong = [i for i in ranked if correct_N[i]], [i for i in ranked if not correct_N[i]]
        num_right, num_wrong = kept_of_each(len(right), len(wrong), num_kept)
        kept_N[right[:num_right] + wrong[:num_wrong]] = True
    return kept_N


def kept_of_each(num_right: int, num_wrong: int, num_kept: int) -> tuple[int, int]:
    """Return how many right and how many wrong solutions stay: `num_kept` together, as equal in number as there are
    such.

    Of an odd number the wrong ones have one more, as in the paper.
    """
    num_kept = min(num_kept, num_right + num_wrong)
    kept_right = min(max(num_kept // 2, num_kept - num_wrong), num_right)
    return kept_right, num_kept - kept_right
