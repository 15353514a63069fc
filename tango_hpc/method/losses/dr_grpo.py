"""The loss of Dr. GRPO (arXiv 2503.20783, Section 3.2): Eq. 1, summed over tokens and divided by a constant.

The constant is the number of responses times `max_response_tokens`, so that a long response is not pushed less per
token than a short one.

Dr. GRPO's advantages, which no deviation divides, are those of the same name.
"""

from __future__ import annotations

from tango_hpc.method.losses.grpo import loss, statistics

__all__ = ["defaults", "loss", "statistics"]

defaults = {"average": "constant", "clip_low": 0.2, "clip_high": 0.2}
