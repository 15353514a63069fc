"""TIS, truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025): min(ρ, cap), with ρ = π_old of the trainer / π of the engine, of a token or of its whole response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tango_hpc.method.tokens import Settings, Tokens

defaults = {"cap": 2.0}
statistics = {"truncated_share": "mean"}


def correction(tokens: Tokens, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token, and whether the weight is truncated."""
    ratio = tokens.log_gap.exp()
    return ratio.clamp(max=settings["cap"]), {"truncated_share": ratio > settings["cap"]}
