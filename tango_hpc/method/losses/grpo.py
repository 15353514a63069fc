"""Eq. 1 of RL Tango (arXiv 2505.15034), as in GRPO (arXiv 2402.03300): the clipped ratio of PPO (arXiv 1707.06347).

    −min(c_t Â_t, clip(c_t, 1 − clip_low, 1 + clip_high) Â_t),  c_t = π_θ(y_t) / π_old(y_t)

averaged over the tokens of a response, then over the responses. RLOO and REINFORCE++ take it too, with advantages of
their own.

Departure: the paper has one ε; here there are two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tango_hpc.method.tokens import Settings, Tokens

defaults = {"average": "response", "clip_low": 0.2, "clip_high": 0.2}
statistics = {"clip_share": "mean"}


def loss(tokens: Tokens, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and whether the clip takes the token's gradient."""
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"]) * tokens.advantages
    return -unclipped.minimum(clipped), {"clip_share": clipped < unclipped}
