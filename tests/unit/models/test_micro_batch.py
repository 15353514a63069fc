"""A micro-batch whose tokens have to be shared out evenly."""

from __future__ import annotations

import pytest
import torch

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.types import TrainSequence
from tango_hpc.models.trainer.micro_batch import MicroBatch, build_micro_batch, check_tokens, response_offsets
from tango_hpc.models.trainer.rotary import Rotary

SEQUENCES = [TrainSequence([1, 2, 3], [4, 5]), TrainSequence([6], [7, 8, 9])]  # four and three fed tokens


def batch_of(members: list[int], multiple: int) -> MicroBatch:
    return build_micro_batch(
        SEQUENCES,
        members,
        response_offsets(SEQUENCES),
        [Rotary(torch.ones(2))],
        torch.float32,
        torch.device("cpu"),
        multiple,
    )


@pytest.mark.parametrize(("multiple", "filling"), [(1, 0), (2, 1), (4, 1), (7, 0), (8, 1), (5, 3)])
def test_filling_lies_behind_the_longest_sequence(multiple: int, filling: int) -> None:
    batch = batch_of([0, 1], multiple)
    assert batch.tokens_1T.tolist() == [[1, 2, 3, 4, *[0] * filling, 6, 7, 8]]
    assert batch.packed.cu_seqlens_q.tolist() == [0, 4 + filling, 7 + filling]
    assert batch.predicted_R.tolist() == [2, 3, 4 + filling, 5 + filling, 6 + filling]
    assert batch.targets_R.tolist() == [4, 5, 7, 8, 9] and batch.flat_R.tolist() == [0, 1, 2, 3, 4]


def test_a_micro_batch_of_nothing_feeds_one_token_to_each() -> None:
    empty = batch_of([], 4)
    assert empty.tokens_1T.tolist() == [[0, 0, 0, 0]] and empty.packed.cu_seqlens_q.tolist() == [0, 4]
    assert len(empty.predicted_R) == len(empty.targets_R) == len(empty.flat_R) == 0


def test_a_token_beyond_the_embedding_is_refused() -> None:
    check_tokens(SEQUENCES, 10)
    check_tokens([], 10)
    with pytest.raises(CheckFailed, match="token 9 is none of the model's 9"):
        check_tokens(SEQUENCES, 9)
