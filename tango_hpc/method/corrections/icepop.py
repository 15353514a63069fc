"""IcePop (Ring-1T, arXiv 2510.18855): ρ where low ≤ ρ ≤ high, else 0, with ρ = π_old of the trainer / π of the engine.

The paper masks tokens, within 0.5 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tango_hpc.method.tokens import Settings, Tokens

defaults = {"low": 0.5, "high": 5.0}
statistics = {"masked_share": "mean"}


def correction(tokens: Tokens, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token, and whether the token is left out."""
    ratio = tokens.log_gap.exp()
    masked = (ratio < settings["low"]) | (ratio > settings["high"])
    return ratio.masked_fill(masked, 0.0), {"masked_share": masked}
