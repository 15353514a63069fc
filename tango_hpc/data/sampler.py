"""The order in which questions are drawn: epochs, shuffled or not, that can be left and taken up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class QuestionSampler:
    """Draws batches of question indices, each epoch in a new order; its whole state is two numbers and a count.

    `fits(index)` says whether a question's prompt fits the context; others are passed over and counted once per
    draw in `num_dropped`.
    """

    def __init__(self, num_questions: int, seed: int, fits: Callable[[int], bool], *, shuffle: bool = True) -> None:
        self._num_questions, self._seed, self._fits, self._shuffle = num_questions, seed, fits, shuffle
        self._epoch, self._position, self.num_dropped = 0, 0, 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray[Any, np.dtype[Any]]:
        if not self._shuffle:
            return np.arange(self._num_questions)
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._num_questions)

    def draw(self, count: int) -> list[int]:
        """The next `count` question indices. Raises ValueError if a whole epoch holds no question that fits."""
        drawn: list[int] = []
        dropped_in_a_row = 0
        while len(drawn) < count:
            if self._position == self._num_questions:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
            index = int(self._order[self._position])
            self._position += 1
            if self._fits(index):
                drawn.append(index)
                dropped_in_a_row = 0
                continue
            self.num_dropped += 1
            dropped_in_a_row += 1
            if dropped_in_a_row >= self._num_questions:
                raise ValueError(f"none of the {self._num_questions} questions fits max_prompt_tokens")
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on at the same place."""
        return {"epoch": self._epoch, "position": self._position, "num_dropped": self.num_dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the data set and the seed must be the same."""
        self._epoch, self._position = state["epoch"], state["position"]
        self.num_dropped = state["num_dropped"]
        self._order = self._shuffled()
