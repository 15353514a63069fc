"""Dr. GRPO (arXiv 2503.20783, Section 3.2): each reward less the mean of its question, not divided by the deviation.

Step rewards (RL Tango, arXiv 2505.15034, Eqs. 5 to 7) likewise, which the paper does not have. The paper's constant
denominator is in the loss `dr_grpo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tango_hpc.method.batches import Advantages, blended, step_sums, within_groups
from tango_hpc.method.equations import less_mean

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings

defaults = {"step_scale": 1.0}


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return the advantages of each solution's tokens."""
    outcomes = within_groups(batch.groups, batch.rewards, less_mean)
    return blended(batch, outcomes, step_sums(batch, less_mean), settings["step_scale"]), state
