"""Random training sequences."""

from __future__ import annotations

import numpy as np

from tango_hpc.base.types import TrainSequence


def random_sequences(num_sequences: int, vocab_size: int, seed: int = 0) -> list[TrainSequence]:
    """Prompts of 1 to 12 tokens and responses of 1 to 20, with advantages and made-up rollout log-probabilities."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(num_sequences):
        prompt = random.integers(0, vocab_size, random.integers(1, 13)).tolist()
        response = random.integers(0, vocab_size, random.integers(1, 21)).tolist()
        sequences.append(
            TrainSequence(
                prompt_ids=prompt,
                response_ids=response,
                advantages=random.normal(size=len(response)).tolist(),
                rollout_logprobs=(-5 + random.normal(size=len(response))).tolist(),
            )
        )
    return sequences
