"""The loss of an update: its settings, the terms of a token, and the statistics of the update.

Shape suffixes: `base.types`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tango_hpc.base.config.hooks import LossConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.types import TrainSequence
from tango_hpc.method.equations import KlEstimator, kl_penalties
from tango_hpc.method.hooks import TokenHook, load_hook
from tango_hpc.method.tokens import Tokens

# What every update measures, and how it is reduced over micro-batches and ranks; "mean" is over the tokens of the
# batch.
REDUCTIONS = {"loss": "sum", "kl": "mean", "entropy": "mean", "gap": "mean", "largest_gap": "max"}
# (log-probabilities, entropies, flat places of the tokens) -> (loss to minimise, statistics by name; others are 0)
TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class LogprobGapError(CheckFailed):
    """Engine and trainer disagree about the log-probabilities of the sampled tokens."""


def _grpo() -> TokenHook:
    return load_hook(LossConfig())


@dataclass(frozen=True)
class LossSettings:
    """The loss of a token: the policy's term by the file `loss`, weighed by the file `correction`, KL and entropy.

    `correction` acts at the `level` of a token or of its response; None: no correction. `kl_coef` is beta of Eq. 1,
    `kl_estimator` one of `equations.kl_penalties`, `entropy_coef` the weight of the entropy bonus. `max_logprob_gap` is
    the mean absolute gap above which the update is refused (None: never). `temperature` and `max_response_tokens` are
    those of sampling. `rate` is a factor of the optimizer's learning rate.
    """

    loss: TokenHook = field(default_factory=_grpo)
    correction: TokenHook | None = None
    level: str = "token"
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    max_logprob_gap: float | None = None
    temperature: float = 1.0
    max_response_tokens: int = 0
    rate: float = 1.0

    @property
    def reductions(self) -> dict[str, str]:
        """How the statistics of an update are reduced, by their names in metrics."""
        return REDUCTIONS | self.loss.reductions | (self.correction.reductions if self.correction else {})

    @property
    def average(self) -> str:
        """How tokens are averaged (`equations.token_weights`)."""
        return self.loss.settings["average"]

    def terms(
        self, tokens: Tokens, entropies_T: Tensor, ref_logprobs_T: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return w_t · loss_t + kl_coef · kl_t − entropy_coef · H_t of each token, and the statistics of each.

        loss_t is Eq. 1's first part, or what the file `loss` has in its place. The caller adds tokens up with
        `token_weights`. H_t in nats: `entropies_T`. kl_t estimates KL(π_θ ‖ π_ref) from the sampled token alone; 0
        without a reference.

        Departures: w_t, the weight by the file `correction`, is not in the paper; it touches neither the KL term nor
        the entropy bonus. That bonus is not in the paper but in the authors' code, with 0.001 for GRPO and RLOO.
        """
        terms_T, measured = self.loss(tokens)
        if self.correction is not None:
            weights_T, more = self.correction(tokens)
            terms_T, measured = terms_T * weights_T.detach(), measured | more
        if self.entropy_coef:
            terms_T = terms_T - self.entropy_coef * entropies_T
        kl_T = torch.zeros_like(terms_T)
        if self.kl_coef:
            assert ref_logprobs_T is not None, "a KL penalty needs the reference's log-probabilities"
            kl_T = kl_penalties(ref_logprobs_T - tokens.logprobs, self.kl_estimator)
            terms_T = terms_T + self.kl_coef * kl_T
        return terms_T, {**measured, "kl": kl_T, "entropy": entropies_T}


@dataclass(frozen=True)
class Batch:
    """Sequences of one kind with their loss, and its weight in an update of several kinds."""

    sequences: Sequence[TrainSequence]
    loss: LossSettings
    weight: float = 1.0


@dataclass(frozen=True)
class UpdateStats:
    """The statistics of an update over the global batch; means are per response token.

    `skipped`: a loss or gradient was not finite, and no weight changed. `logprob_gap_*` compare trainer and
    rollout log-probabilities (0 where there are none). `method`: the statistics of the method's files, by their names
    in metrics. `operations`: floating-point, of forward and backward.
    """

    loss: float
    grad_norm: float
    kl: float
    entropy: float
    logprob_gap_mean: float
    logprob_gap_max: float
    num_tokens: int
    num_responses: int
    learning_rate: float
    skipped: bool
    method: Mapping[str, float] = field(default_factory=dict)
    operations: float = 0.0


class ChunkLoss:
    """A `TokenLoss` of the tokens at `flat_R`, asked for some of them at a time; adds up what it measures."""

    def __init__(self, token_loss: TokenLoss, flat_R: Tensor, reductions: Mapping[str, str]) -> None:
        self._token_loss, self._flat_R, self._reductions = token_loss, flat_R, reductions
        self._found: list[dict[str, Tensor]] = []

    def __call__(self, logprobs: Tensor, entropy: Tensor, part: slice) -> Tensor:
        """Return the loss of the tokens in `part` of `flat_R`, which has these log-probabilities and entropies."""
        value, statistics = self._token_loss(logprobs, entropy, self._flat_R[part])
        self._found.append({"loss": value.detach().double()} | reduced(statistics, self._reductions))
        return value

    def statistics(self) -> dict[str, Tensor]:
        """Return the statistics measured so far."""
        return combine(self._found, self._reductions)


def reduced(statistics: Mapping[str, Tensor], reductions: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the sum of each statistic over some tokens, or its maximum; a maximum of no tokens is left out."""
    return {
        name: values_T.detach().double().sum() if reductions[name] != "max" else values_T.detach().double().amax()
        for name, values_T in statistics.items()
        if len(values_T) or reductions[name] != "max"
    }


def of_batches(found: Sequence[tuple[dict[str, float], int]], reductions: Mapping[str, str]) -> dict[str, float]:
    """Return statistics over batches from those of each, which come with its number of tokens."""
    num_tokens = max(sum(count for _, count in found), 1)
    return {
        name: max(totals[name] for totals, _ in found)
        if reduction == "max"
        else sum(totals[name] * (count / num_tokens if reduction == "mean" else 1) for totals, count in found)
        for name, reduction in reductions.items()
    }


def combine(found: Sequence[Mapping[str, Tensor]], reductions: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the statistics that were measured somewhere, over all places."""
    values = {name: [place[name] for place in found if name in place] for name in reductions}
    return {
        name: torch.stack(measured).sum() if reductions[name] != "max" else torch.stack(measured).amax()
        for name, measured in values.items()
        if measured
    }
