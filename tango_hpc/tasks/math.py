"""Mathematics: questions of any prepared set, graded as its source is, by default as mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tango_hpc import benchmarks
from tango_hpc.benchmarks.base import math_item
from tango_hpc.grading.pool import GradeItem, GradingPool
from tango_hpc.protocol.solution import Step


class Math:
    """The task. Rows of a benchmark are asked and graded as that benchmark says, all others as they stand.

    Grading runs in worker processes that start with the first answer that needs one; `pool.outcomes` counts what
    became of all answers (time, memory, ...).
    """

    name = "math"

    def __init__(self, num_workers: int = 2) -> None:
        self.pool = GradingPool(num_workers)

    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[bool]:
        """Whether each answer is right; no answer is wrong. The result does not depend on the other answers."""
        given = [(index, row, answer) for index, (row, answer) in enumerate(answers) if answer is not None]
        verdicts = self.pool.grade([grade_item(row, answer) for _, row, answer in given])
        right = [False] * len(answers)
        for (index, _, _), verdict in zip(given, verdicts, strict=True):
            right[index] = verdict.correct
        return right

    def label_steps(self, row: dict[str, Any], steps: Sequence[Step]) -> None:
        """There are no gold labels of steps."""
        return None


def grade_item(row: dict[str, Any], answer: str) -> GradeItem:
    """How an answer to this row is graded."""
    if row["source"] in benchmarks.NAMES:
        return benchmarks.get_benchmark(row["source"]).grade(row, answer)
    return math_item(row, answer)
