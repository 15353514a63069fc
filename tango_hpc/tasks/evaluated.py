"""Questions of `tango eval` as tasks: a benchmark's, and the held-out ones of a run's own task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tango_hpc.benchmarks.base import Benchmark, boxed_answer
from tango_hpc.grading.pool import GradeItem, GradingPool, Verdict
from tango_hpc.protocol.solution import Step
from tango_hpc.tasks.base import Task
from tango_hpc.tasks.math import Math


class BenchmarkTask(Math):
    """Asked, read and graded as the benchmark says."""

    def __init__(self, benchmark: Benchmark, pool: GradingPool) -> None:
        super().__init__(pool)
        self._benchmark, self.name = benchmark, benchmark.name

    def statement(self, row: Mapping[str, Any]) -> str:
        """The benchmark's wording of a row."""
        return self._benchmark.statement(row)

    def answer(self, response: str) -> str | None:
        """The answer where the benchmark looks for it."""
        return self._benchmark.extract(response)

    def item(self, row: Mapping[str, Any], answer: str) -> GradeItem:
        """How an answer to this row is graded."""
        return self._benchmark.grade(row, answer)


class AnyBox:
    """A run's own task, for models that may not know the format: the answer may stand in any box."""

    name = "task"

    def __init__(self, task: Task) -> None:
        self._task = task

    def statement(self, row: Mapping[str, Any]) -> str:
        """As the task asks it."""
        return self._task.statement(row)

    def answer(self, response: str) -> str | None:
        """The answer of our own format, or else the last box."""
        return boxed_answer(response)

    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[Verdict]:
        """As the task grades."""
        return self._task.grade_all(answers)

    def label_steps(self, row: dict[str, Any], steps: Sequence[Step]) -> list[int] | None:
        """As the task labels."""
        return self._task.label_steps(row, steps)
