"""What is asked, how answers are graded, and gold labels of steps where they exist."""

from __future__ import annotations

import importlib

from tango_hpc.tasks.base import Task

__all__ = ["Task", "get_task"]

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
