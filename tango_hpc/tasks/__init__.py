"""What is asked, how answers are graded, and gold labels of steps where they exist."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from tango_hpc.protocol.solution import Step


class Task(Protocol):
    """One kind of question. A question is a row of a data set: id, question, answer, source."""

    name: str

    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[bool]:
        """Eq. 2 for each (question row, extracted answer); no answer is wrong."""
        ...

    def label_steps(self, row: dict[str, Any], steps: Sequence[Step]) -> list[int] | None:
        """The gold label of each step, +1 right or −1 wrong; None for a task that has none."""
        ...


_TASKS = {
    "last_letter": "tango_hpc.tasks.last_letter:LastLetter",
    "math": "tango_hpc.tasks.math:Math",
}


def get_task(name: str) -> Task:
    """The task of that name; its module is imported only now."""
    if name not in _TASKS:
        raise ValueError(f"no task {name!r}; there are {', '.join(_TASKS)}")
    module, _, attribute = _TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()
