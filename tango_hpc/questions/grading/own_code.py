"""The code of a user's own task: one class in one Python file, with `grade` and whatever else it has.

It is called in grading workers as the shipped rules are. A mistake in it is reported with its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tango_hpc.base.errors import UserError
from tango_hpc.base.user_code import mistakes_in, read_source, run_source

MODULE = "tango_hpc_own_task"  # the name that the file has as a module


def grade(
    gold: str, answer: str, *, file: str, source: str, settings: Mapping[str, Any], question: Mapping[str, Any]
) -> bool:
    """Return whether the class in `source`, which `file` held, calls `answer` right. Raises `UserError` for no truth
    value.
    """
    with mistakes_in(file):
        result = own_task(file, settings, source).grade(dict(question), answer)
    if not _is_truth_value(result):
        raise UserError(f"{file}: grade gave {result!r}; it must give True or False")
    return bool(result)


def label_steps(
    gold: str, answer: str, *, file: str, source: str, settings: Mapping[str, Any], question: Mapping[str, Any],
    steps: Sequence[str],
) -> list[int] | None:  # fmt: skip
    """Return the labels that the class in `source` gives these steps, +1 or −1 each. Raises `UserError` for anything
    else.
    """
    with mistakes_in(file):
        labels = own_task(file, settings, source).label_steps(dict(question), list(steps))
        labels = None if labels is None else [int(label) for label in labels]
    if labels is not None and (len(labels) != len(steps) or set(labels) - {1, -1}):
        raise UserError(f"{file}: label_steps gave {labels} for {len(steps)} steps; it must give +1 or -1 for each")
    return labels


def own_task(file: str, settings: Mapping[str, Any], source: str | None = None) -> Any:
    """Return the object that `source` describes, which `file` held or, by default, holds; made once in a process.

    Raises `UserError` for a mistake in it.
    """
    # By its source: times and cached bytecode take a version for another one of the same moment.
    return _own_task(file, json.dumps(settings, sort_keys=True), read_source(file) if source is None else source)


@lru_cache
def _own_task(file: str, settings: str, source: str) -> Any:
    module = run_source(file, source, MODULE)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == MODULE and hasattr(value, "grade")
    ]
    if len(classes) != 1:
        names = ", ".join(each.__name__ for each in classes) or "none"
        raise UserError(f"{file} must have one class with a method `grade`; it has {names} (docs/your_own_task.md)")
    with mistakes_in(file, "task.settings: "):
        return classes[0](**json.loads(settings))


def _is_truth_value(result: object) -> bool:
    return isinstance(result, bool) or type(result).__name__ in ("bool_", "bool")  # NumPy's own as well
