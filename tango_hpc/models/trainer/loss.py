"""The settings of an update's loss, and the statistics of the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tango_hpc.base.errors import CheckFailed
from tango_hpc.method.equations import KlEstimator, LossAverage

# What an update measures, and how it adds up over micro-batches and ranks.
STATISTICS = {"loss": "sum", "kl": "sum", "entropy": "sum", "clipped": "sum", "gap": "sum", "largest_gap": "max"}
# (log-probabilities, entropies, flat places of the tokens) -> (loss to minimise, statistics by name; others are 0)
TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class LogprobGapError(CheckFailed):
    """Engine and trainer disagree about the log-probabilities of the sampled tokens."""


@dataclass(frozen=True)
class LossSettings:
    """Eq. 1: clip range [1 - clip_low, 1 + clip_high], beta `kl_coef`, and what is done about the engine's gap.

    `kl_estimator` is one of `equations.kl_penalties`, `entropy_coef` the weight of the entropy bonus, `loss_average`
    how tokens are averaged (`equations.token_weights`). `importance_cap` truncates the weights trainer / engine
    (None: no correction). `max_logprob_gap` is the mean absolute gap above which the update is refused (None: never).
    `temperature` is the sampling temperature.
    """

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    loss_average: LossAverage = "response"
    importance_cap: float | None = None
    max_logprob_gap: float | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class UpdateStats:
    """The statistics of an update over the global batch; means are per response token.

    `skipped`: a loss or gradient was not finite, and no weight changed. `logprob_gap_*` compare trainer and
    rollout log-probabilities (0 where there are none). `operations`: floating-point, of forward and backward.
    """

    loss: float
    grad_norm: float
    kl: float
    entropy: float
    clip_share: float
    logprob_gap_mean: float
    logprob_gap_max: float
    num_tokens: int
    num_responses: int
    learning_rate: float
    skipped: bool
    operations: float = 0.0


class ChunkLoss:
    """A `TokenLoss` of the tokens at `flat_R`, asked for some of them at a time; adds up what it measures."""

    def __init__(self, token_loss: TokenLoss, flat_R: Tensor) -> None:
        self._token_loss, self._flat_R = token_loss, flat_R
        self._found: list[dict[str, Tensor]] = []

    def __call__(self, logprobs: Tensor, entropy: Tensor, part: slice) -> Tensor:
        """Return the loss of the tokens in `part` of `flat_R`, which has these log-probabilities and entropies."""
        value, statistics = self._token_loss(logprobs, entropy, self._flat_R[part])
        self._found.append({name: number.detach().double() for name, number in {"loss": value, **statistics}.items()})
        return value

    def statistics(self) -> dict[str, Tensor]:
        """Return the `STATISTICS` measured so far."""
        return combine(self._found)


def combine(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return those of the `STATISTICS` that were measured somewhere, over all places."""
    values = {name: [place[name] for place in found if name in place] for name in STATISTICS}
    return {
        name: torch.stack(measured).sum() if STATISTICS[name] == "sum" else torch.stack(measured).amax()
        for name, measured in values.items()
        if measured
    }
