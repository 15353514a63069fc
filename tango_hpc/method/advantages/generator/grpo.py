"""GRPO (arXiv 2402.03300) with the step rewards of RL Tango (arXiv 2505.15034, Eqs. 4 to 7).

    Â_t = (1 − α) (r − mean) / std + α · Σ over the steps that end at t or later of (r_k − mean) / std

Outcome rewards are compared with those of the same question, step rewards with all of the same question's solutions. A
step reward that is alone stays as it is, as in the authors' code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tango_hpc.method.batches import Advantages, blended, step_sums, within_groups
from tango_hpc.method.equations import FloatArray, normalize

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings

defaults = {"step_scale": 1.0}


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return the advantages of each solution's tokens."""
    outcomes = within_groups(batch.groups, batch.rewards, normalize)
    return blended(batch, outcomes, step_sums(batch, _normalized_steps), settings["step_scale"]), state


def _normalized_steps(rewards: FloatArray) -> FloatArray:
    return rewards if len(rewards) == 1 else normalize(rewards)
