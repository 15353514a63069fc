"""MIS, masked importance sampling (Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch", 2025): ρ where ρ ≤ cap, else 0, with ρ = π_old of the trainer / π of the engine.

The authors advise the level of sequences: a response that the trainer finds far likelier than the engine is left out
as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tango_hpc.method.tokens import Settings, Tokens

defaults = {"cap": 2.0}
statistics = {"masked_share": "mean"}


def correction(tokens: Tokens, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token, and whether the token is left out."""
    ratio = tokens.log_gap.exp()
    masked = ratio > settings["cap"]
    return ratio.masked_fill(masked, 0.0), {"masked_share": masked}
