"""GSPO (arXiv 2507.18071, Eq. 5 and 13): the ratio of a response as a whole, in place of each token's.

    −min(s_t Â_t, clip(s_t, 1 − clip_low, 1 + clip_high) Â_t),  s_t = sg[s] · π_θ(y_t) / sg[π_θ(y_t)]

with s the geometric mean of c_t over the response and sg a stopped gradient. This is the paper's GSPO-token: where all
tokens of a response have one advantage, loss and gradient are those of GSPO; step advantages (Eq. 7 of RL Tango) may
differ between tokens. Ratios of responses are much closer to 1 than those of tokens, and so is the paper's clip.

The first update of a batch has s = 1; `train.updates_per_batch` above 1 makes a difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tango_hpc.method.tokens import Settings, Tokens

defaults = {"average": "response", "clip_low": 3e-4, "clip_high": 4e-4}
statistics = {"clip_share": "mean"}
needs = {"sequence_ratio"}


def loss(tokens: Tokens, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and whether the clip takes the token's gradient."""
    ratio = (tokens.sequence_log_ratio + tokens.logprobs - tokens.logprobs.detach()).exp()
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"]) * tokens.advantages
    return -unclipped.minimum(clipped), {"clip_share": clipped < unclipped}
