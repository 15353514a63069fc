"""Response tokens as the files of a method see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Some tokens of a batch: a chunk of those that one rank computes, of one or more responses.

    Each field is a tensor of shape (T,); log-probabilities are in nats. Gradients flow through `logprobs` alone.

    logprobs            of the policy now
    old_logprobs        of the policy before the first update of the batch, by the trainer
    advantages          by the files of `algorithm.advantages`, Eqs. 2 to 9
    log_gap             log of trainer / engine of the sampled token before the first update; with `level: sequence`,
                        the sum over the token's response; 0 where there are no log-probabilities of an engine
    lengths             tokens of the token's response
    sequence_log_ratio  mean of logprobs − old_logprobs over the token's response, where the file `needs` it, else 0
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    log_gap: Tensor
    lengths: Tensor
    sequence_log_ratio: Tensor

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(*(getattr(self, field.name)[part] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.logprobs)
