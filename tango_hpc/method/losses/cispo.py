"""CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5): the ratio weighs a token's log-probability, and is clipped alone.

    −sg[min(c_t, max_ratio)] · Â_t · log π_θ(y_t)

averaged over all tokens of the batch. Every token keeps a gradient; a large ratio no longer takes the token out.

Departures: the paper names a lower bound too and does not use it; there is none here. The paper does not say its
`max_ratio`; 5 is that of ScaleRL (arXiv 2510.13786).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tango_hpc.method.tokens import Settings, Tokens

defaults = {"average": "token", "max_ratio": 5.0}
statistics = {"clip_share": "mean"}


def loss(tokens: Tokens, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and whether its ratio is above `max_ratio`."""
    ratio = (tokens.logprobs - tokens.old_logprobs).detach().exp()
    weight = ratio.clamp(max=settings["max_ratio"])
    return -weight * tokens.advantages * tokens.logprobs, {"clip_share": ratio > settings["max_ratio"]}
