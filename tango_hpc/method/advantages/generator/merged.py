"""Rewards merged before they are normalised, which Section 3.2 of RL Tango (arXiv 2505.15034) advises against.

    (1 − α) · outcome reward + α · sum of the step rewards

compared within the question as in GRPO. Every token of a solution gets the same advantage, and how much the steps weigh
depends on how far outcomes and judgements happen to be spread: an ablation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tango_hpc.method.batches import Advantages, every_token, within_groups
from tango_hpc.method.equations import normalize

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return one advantage for all tokens of each solution."""
    of_steps = np.array([rewards.sum() for rewards in batch.mean_step_rewards()])
    merged = (1 - batch.alpha) * batch.rewards + batch.alpha * of_steps
    return every_token(batch, within_groups(batch.groups, merged, normalize)), state
