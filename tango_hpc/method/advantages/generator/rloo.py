"""RLOO (arXiv 2402.14740) with the step rewards of RL Tango (arXiv 2505.15034, Eqs. 4 to 7).

Each reward less the mean of the others: of the other solutions of the question, or of all other step rewards of the
question, those of the same solution included, as in the authors' code.

The authors multiply step advantages by 10 (`step_scale`): no deviation divides them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tango_hpc.method.batches import Advantages, blended, step_sums, within_groups
from tango_hpc.method.equations import leave_one_out

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings

defaults = {"step_scale": 1.0}


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return the advantages of each solution's tokens."""
    outcomes = within_groups(batch.groups, batch.rewards, leave_one_out)
    return blended(batch, outcomes, step_sums(batch, leave_one_out), settings["step_scale"]), state
