"""Plain records that the wings hand to each other, and the legend of shape suffixes. No torch, no vLLM.

A name ends with the sizes of its axes, the outermost first: `rewards_N_K` has K rewards for each of N responses.

N  responses of a batch, or their tokens in one flat vector    T  tokens of one response, or of a micro-batch
Q  questions                                                   S  sequences of a micro-batch, steps of a group
M  rollouts or samples of one question                         R  response tokens that this rank computes
V  verifications of one solution                               B  resamples of a bootstrap
K  steps of one solution                                       L  places of a padded sequence

Lists of lists may be ragged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TrackerName = Literal["tensorboard", "wandb", "mlflow"]  # who draws curves (base/run/trackers.py)
AlphaSchedule = Literal["exponential", "linear", "cosine", "constant"]
ClassWeighting = Literal["sqrt_inverse", "inverse", "off"]
PerToken = Sequence[float] | NDArray[np.floating]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete. `seed` makes its sampling independent of the rest of the batch."""

    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class SamplingSettings:
    """The settings of decoding; `temperature` 0 is greedy. `max_tokens` counts response tokens.

    A response ends with the first of `stop_token_ids`, or with the token that completes the first of `stop_strings`,
    special tokens included, in what it says; that token belongs to it in either case.
    """

    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One response. `token_ids` and `logprobs` (of the sampled tokens, at the sampling temperature) are parallel.

    `finish_reason` is "stop" (the last of `token_ids` is a stop token or completes a stop string) or "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass
class TrainSequence:
    """One prompt with its response, as the trainer sees it.

    `advantages` and `rollout_logprobs` have one entry per response token; fine-tuning leaves both empty.
    `reference_logprobs` is filled in where a KL penalty is asked for, `old_logprobs` (of the policy before the first
    of several updates) by the first one where a batch gets more. `log_ratio`: mean of the present policy's
    log-probabilities less `old_logprobs`, 0 before the first update.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    advantages: PerToken = field(default_factory=list)
    rollout_logprobs: PerToken = field(default_factory=list)
    reference_logprobs: PerToken = field(default_factory=list)
    old_logprobs: PerToken = field(default_factory=list)
    log_ratio: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)
