"""REINFORCE++ (arXiv 2501.03262) with the step rewards of RL Tango (arXiv 2505.15034, Eqs. 4 to 7).

Outcome rewards are normalised over the batch. Step rewards are summed first (Eq. 6), and the sums are whitened over the
tokens of all judged solutions, as the paper words it.

Departure: the authors whiten outcomes over the batch's tokens, so that long responses weigh more; here every response
counts once, as in Eq. 4. Their loop over the wrong axis leaves little of the step rewards before the whitening.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tango_hpc.base.errors import UserError
from tango_hpc.method.batches import Advantages, blended, step_sums
from tango_hpc.method.equations import normalize, whitened_step_advantages

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings

defaults = {"step_scale": 1.0}


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return the advantages of each solution's tokens."""
    if settings["max_draws"] > 1:
        raise UserError(
            "algorithm.advantages.generator.settings.max_draws: reinforce_plus_plus compares over the batch, so that "
            "no question is without signal by itself; set it to 1"
        )
    sums = step_sums(batch, lambda rewards: rewards)
    judged = [(i, v) for i, given in enumerate(batch.step_rewards) for v, one in enumerate(given) if len(one)]
    for (i, v), whitened in zip(judged, whitened_step_advantages([sums[i][v] for i, v in judged]), strict=False):
        sums[i][v] = whitened
    return blended(batch, normalize(batch.rewards), sums, settings["step_scale"]), state
