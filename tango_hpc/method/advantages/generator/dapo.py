"""DAPO (arXiv 2503.14476): GRPO with overlong reward shaping (Eq. 13) and dynamic sampling (Eq. 11).

A solution of more than max_response_tokens − overlong_buffer tokens loses up to `overlong_penalty`, in proportion to
how far it reaches into the buffer. Questions whose solutions are all right or all wrong are not trained on; where
`max_draws` is above 1, as many others are drawn in their place.

Departures: step rewards (RL Tango, Eqs. 5 to 7) enter as in `grpo`; a question is left out by its answers alone, so
that its step rewards are not learnt from. DAPO's clip and mean are the loss `dapo`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tango_hpc.method.advantages.generator import grpo
from tango_hpc.method.batches import Advantages, members

if TYPE_CHECKING:
    from tango_hpc.method.batches import Solutions
    from tango_hpc.method.tokens import Settings

defaults = {**grpo.defaults, "overlong_buffer": 0, "overlong_penalty": 1.0, "max_draws": 3}


def advantages(batch: Solutions, settings: Settings, state: Any) -> Advantages:
    """Return the advantages of each solution's tokens; None for questions that teach nothing."""
    buffer = settings["overlong_buffer"]
    beyond = np.asarray(batch.lengths) - (batch.max_response_tokens - buffer)
    penalties = settings["overlong_penalty"] * np.clip(beyond / max(buffer, 1), 0.0, 1.0)
    found, state = grpo.advantages(replace(batch, rewards=batch.rewards - penalties), settings, state)
    for group in members(batch.groups):
        if len({bool(batch.correct[i]) for i in group}) == 1:
            for i in group:
                found[i] = None
    return found, state
