"""The loss of Dr. GRPO (arXiv 2503.20783, Section 3.2): Eq. 1, summed over tokens and divided by a constant.

The constant is the number of responses times `max_response_tokens`, so that a long response is not pushed less per
token than a short one.

Departure: Dr. GRPO also leaves out the division of advantages by their deviation. `algorithm.name: rloo` comes
closest: for M responses of a question RLOO's advantages are those of Dr. GRPO times M / (M − 1).
"""

from __future__ import annotations

from tango_hpc.method.losses.grpo import loss, statistics

__all__ = ["defaults", "loss", "statistics"]

defaults = {"average": "constant", "clip_low": 0.2, "clip_high": 0.2}
