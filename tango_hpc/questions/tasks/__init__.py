"""Tasks: questions, the grading of answers, and gold labels of steps where they exist."""

from __future__ import annotations

import importlib

from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.questions.tasks.base import Task

__all__ = ["Task", "get_task"]

_TASKS = {
    "last_letter": "tango_hpc.questions.tasks.last_letter:LastLetter",
    "math": "tango_hpc.questions.tasks.math:Math",
}


def get_task(settings: TaskConfig) -> Task:
    """Return the task of these settings; its module is imported only now."""
    if settings.file is not None:
        from tango_hpc.questions.tasks.own import OwnTask

        return OwnTask(settings)
    module, _, attribute = _TASKS[settings.name].partition(":")
    return getattr(importlib.import_module(module), attribute)()
