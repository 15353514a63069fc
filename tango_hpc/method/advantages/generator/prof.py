"""PROF, the process consistency filter (arXiv 2509.03403): step scores choose the rollouts to learn from.

Instead of blending step advantages into Eq. 7, where a verifier that can be fooled is optimised against, PROF draws
more rollouts of a question than it trains on and keeps those whose steps are judged as their outcome is: right
solutions with many steps judged right, wrong ones with many judged wrong. What is kept is balanced between the two, and
learns from its outcome rewards alone: `algorithm.alpha_start` must be 0.

As in the paper's Algorithm 1 ("both" groups are filtered, by the mean over steps). Departures: no extra penalty on
solutions of one step or of many (its lambda, H_lambda); the scores are a verifier's judgements, +1 and -1, not a reward
model's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tango_hpc.base.errors import UserError
from tango_hpc.method.batches import Advantages, members
from tango_hpc.method.equations import FloatArray, normalize
from tango_hpc.method.steady_verifier import kept_of_each

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings

defaults = {"trained_rollouts": 2}
_KEY = "algorithm.advantages.generator"


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return GRPO's outcome advantages of the solutions that are kept, None for the others."""
    if batch.alpha > 0:
        raise UserError(f"{_KEY}: prof takes no step advantages; set algorithm.alpha_start to 0")
    if not batch.step_rewards[0]:
        raise UserError(f"{_KEY}: prof needs a verifier, whose step judgements choose the rollouts")
    if settings["trained_rollouts"] >= max(map(len, members(batch.groups))):
        raise UserError(
            f"{_KEY}.settings.trained_rollouts: {settings['trained_rollouts']} leaves nothing to choose; keep fewer or "
            "raise train.rollouts_per_question"
        )
    kept = kept_rollouts(batch.groups, batch.correct, batch.mean_step_rewards(), settings["trained_rollouts"])
    found: list[FloatArray | None] = [None] * len(kept)
    for group in members(batch.groups):
        compared = [i for i in group if kept[i]]
        for i, value in zip(compared, normalize(batch.rewards[compared]), strict=True):
            found[i] = np.full(batch.lengths[i], value)
    return found, state


def kept_rollouts(
    group_ids_N: Sequence[Hashable], correct_N: NDArray[np.bool_], step_rewards_N_K: Sequence[FloatArray], num_kept: int
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
    for group in members(group_ids_N):
        ranked = sorted(group, key=lambda i: -consistency_N[i])  # stable
        right, wrong = [i for i in ranked if correct_N[i]], [i for i in ranked if not correct_N[i]]
        num_right, num_wrong = kept_of_each(len(right), len(wrong), num_kept)
        kept_N[right[:num_right] + wrong[:num_wrong]] = True
    return kept_N
