"""The code of a user's own task: one class in one Python file, with `grade` and whatever else it has.

It is called in grading workers as the shipped rules are. A mistake in it is reported with its file and line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, TypedDict

from tango_hpc.base.errors import UserError
from tango_hpc.base.user_code import mistakes_in, read_source, run_source

MODULE = "tango_hpc_own_task"  # the name that the file has as a module


class Graded(TypedDict, total=False):
    """The grade of an answer: whether it is right and, where the class scores, its score and named parts of that."""

    correct: bool
    score: float
    parts: dict[str, float]


def grade(
    gold: str, answer: str, *, file: str, source: str, settings: Mapping[str, Any], question: Mapping[str, Any]
) -> Graded:
    """Return the grade that the class in `source`, which `file` held, gives `answer`.

    True or False; or a score in [0, 1], alone or with a dictionary of parts: the answer is right from the class's
    `threshold` on, 1 by default. Raises `UserError` for anything else.
    """
    with mistakes_in(file):
        task = own_task(file, settings, source)
        result, threshold = task.grade(dict(question), answer), getattr(task, "threshold", 1.0)
    if _is_truth_value(result):
        return {"correct": bool(result)}
    score, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not (_is_number(score) and 0.0 <= score <= 1.0):
        raise UserError(f"{file}: grade gave {result!r}; it must give True or False, or a score from 0 to 1")
    if not (isinstance(parts, Mapping) and all(isinstance(name, str) and _is_number(parts[name]) for name in parts)):
        raise UserError(
            f"{file}: grade gave the parts {parts!r}; they must be a dictionary of names and finite numbers"
        )
    return {
        "correct": bool(score >= threshold),
        "score": float(score),
        "parts": {name: float(value) for name, value in parts.items()},
    }


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


def _is_number(value: object) -> bool:
    """Return whether it is a finite number; NumPy's own count, truth values do not."""
    return not _is_truth_value(value) and isinstance(value, Real) and math.isfinite(value)


def _is_truth_value(result: object) -> bool:
    return isinstance(result, bool) or type(result).__name__ in ("bool_", "bool")  # NumPy's own as well
