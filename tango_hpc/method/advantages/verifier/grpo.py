"""Eq. 9 of RL Tango (arXiv 2505.15034) with GRPO: s · (r − mean) / std over the verifications of one solution.

The class weight s comes after the normalisation and does not enter its statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tango_hpc.method.batches import Advantages, every_token, within_groups
from tango_hpc.method.equations import normalize

if TYPE_CHECKING:
    from tango_hpc.method.batches import Verifications
    from tango_hpc.method.tokens import Settings


def advantages(batch: Verifications, settings: Settings, state: Any) -> Advantages:
    """Return one advantage for all tokens of each verification."""
    return every_token(batch, batch.class_weights * within_groups(batch.groups, batch.rewards, normalize)), state
