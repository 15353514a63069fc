"""The loss of DAPO (arXiv 2503.14476, Eq. 8): Eq. 1 with a higher clip above 1 and the mean over all tokens of a batch.

DAPO has no KL penalty: set `algorithm.kl_coef` to 0. Its overlong reward shaping and its dynamic sampling are in the
generator's advantages `dapo`.
"""

from __future__ import annotations

from tango_hpc.method.losses.grpo import loss, statistics

__all__ = ["defaults", "loss", "statistics"]

defaults = {"average": "token", "clip_low": 0.2, "clip_high": 0.28}
