"""A micro-batch as tensors, and the per-token results of a global batch as one flat vector.

T: tokens fed to a micro-batch. R: response tokens predicted in it. N: response tokens of the global batch, those
of sequence 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.types import TrainSequence
from tango_hpc.models.parallel.ranks import to_device
from tango_hpc.models.trainer.attention import PackedSequences
from tango_hpc.models.trainer.rotary import Rotary


@dataclass(frozen=True)
class MicroBatch:
    """Packed inputs of one forward pass.

    `predicted_R` indexes the tokens whose hidden state predicts a response token, `targets_R` are those response
    tokens and `flat_R` their places in the global batch's flat vector.
    """

    tokens_1T: Tensor
    packed: PackedSequences
    predicted_R: Tensor
    targets_R: Tensor
    flat_R: Tensor


def response_offsets(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Start of each sequence's response in the flat vector, and the total at the end: [sequences + 1]."""
    return np.concatenate([[0], np.cumsum([len(sequence.response_ids) for sequence in sequences])]).astype(np.int64)


def flat(sequences: Sequence[TrainSequence], name: str) -> np.ndarray:
    """Return one field of all sequences in one vector, [N]. ValueError unless it has a number for each response
    token.
    """
    values = [getattr(sequence, name) for sequence in sequences]
    for index, (value, sequence) in enumerate(zip(values, sequences, strict=True)):
        if len(value) != len(sequence.response_ids):
            raise ValueError(
                f"sequence {index} has {len(value)} {name} for {len(sequence.response_ids)} response tokens"
            )
    return np.concatenate([np.zeros(0), *values])


def give(sequences: Sequence[TrainSequence], name: str, values: Sequence[np.ndarray]) -> None:
    """Set one field of each sequence."""
    for sequence, values_T in zip(sequences, values, strict=True):
        setattr(sequence, name, values_T)


def fed_length(sequence: TrainSequence) -> int:
    """Return tokens that go through the model: all but the last, which predicts nothing."""
    return sequence.num_tokens - 1


def check_tokens(sequences: Sequence[TrainSequence], vocab_size: int) -> None:
    """Raise CheckFailed for a token that the model has no embedding of."""
    largest = max((max([*one.prompt_ids, *one.response_ids], default=0) for one in sequences), default=0)
    if largest >= vocab_size:
        raise CheckFailed(f"token {largest} is none of the model's {vocab_size}: another model's tokenizer made it")


def build_micro_batch(
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    offsets: np.ndarray,
    rotaries: Sequence[Rotary],
    dtype: torch.dtype,
    device: torch.device,
    multiple: int = 1,
) -> MicroBatch:
    """Pack the sequences that `members` index, the longest first; an empty micro-batch predicts nothing.

    The number of tokens is made a `multiple` by more of them behind the first sequence, where causal attention shows
    them to no other token.
    """
    if not members:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        packed = PackedSequences.of_lengths([multiple], rotaries, dtype, device)
        return MicroBatch(torch.zeros((1, multiple), dtype=torch.int64, device=device), packed, empty, empty, empty)
    tokens, predicted, targets, flat, lengths, start = [], [], [], [], [], 0
    filling = -sum(fed_length(sequences[member]) for member in members) % multiple
    for member in members:
        sequence = sequences[member]
        ids = np.array(sequence.prompt_ids + sequence.response_ids, dtype=np.int64)
        num_prompt, length = len(sequence.prompt_ids), len(ids) - 1
        tokens.append(ids[:-1])
        predicted.append(np.arange(start + num_prompt - 1, start + length))
        targets.append(ids[num_prompt:])
        flat.append(np.arange(offsets[member], offsets[member + 1]))
        tokens.append(np.zeros(filling, dtype=np.int64))
        lengths.append(length + filling)
        start += length + filling
        filling = 0

    def joined(parts: list[np.ndarray]) -> Tensor:
        return to_device(torch.from_numpy(np.concatenate(parts)), device)

    packed = PackedSequences.of_lengths(lengths, rotaries, dtype, device)
    return MicroBatch(joined(tokens)[None], packed, joined(predicted), joined(targets), joined(flat))
