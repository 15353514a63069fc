"""A count of the responses that an engine has completed while it generates."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


class CountedResponses(tqdm):
    """The progress bars that vLLM asks for (`use_tqdm` of `LLM.generate`): they draw nothing, that of responses
    tells.
    """

    monitor_interval = 0  # no thread that draws it again

    def __init__(self, *args: Any, tell: Callable[[int, int], None], **settings: Any) -> None:
        """`tell` gets the number of complete responses and of all, whenever one is complete."""
        # vLLM divides by the time that it keeps, which it does not where TQDM_DISABLE is set.
        super().__init__(*args, **(settings | {"file": io.StringIO(), "disable": False, "gui": False}))
        self._tell = tell

    def update(self, n: float | None = 1) -> bool | None:
        """Count `n` more."""
        drawn = super().update(n)
        if self.iterable is None:  # else it counts prompts that are handed in
            self._tell(int(self.n), int(self.total))
        return drawn
