"""The order in which questions are drawn: epochs, shuffled or not, that can be left and taken up again."""

from __future__ import annotations

from typing import Any

import numpy as np


class QuestionSampler:
    """Draws batches of question indices, each epoch in a new order; its whole state is two numbers."""

    def __init__(self, num_questions: int, seed: int, *, shuffle: bool = True) -> None:
        assert num_questions > 0, "nothing to draw from"
        self._num_questions, self._seed, self._shuffle = num_questions, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray[Any, np.dtype[Any]]:
        if not self._shuffle:
            return np.arange(self._num_questions)
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._num_questions)

    def draw(self, count: int) -> list[int]:
        """Return the next `count` question indices."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self._position == self._num_questions:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
            drawn.append(int(self._order[self._position]))
            self._position += 1
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Return the state from which `load_state_dict` goes on at the same place."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken; the data set and the seed must be the same."""
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()
