"""Questions of a benchmark as a task for `tango eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tango_hpc.questions.benchmarks.base import Benchmark
from tango_hpc.questions.grading.pool import GradeItem, GradingPool
from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.tasks.math import Math


class BenchmarkTask(Math):
    """Asked, read and graded as the benchmark says."""

    def __init__(self, benchmark: Benchmark, pool: GradingPool) -> None:
        super().__init__(pool)
        self._benchmark, self.name = benchmark, benchmark.name

    def statement(self, row: Mapping[str, Any]) -> str:
        """Return the benchmark's wording of a row."""
        return self._benchmark.statement(row)

    def answer(self, solution: Solution) -> str | None:
        """Return the answer where the benchmark looks for it."""
        return self._benchmark.extract(solution)

    def item(self, row: Mapping[str, Any], answer: str) -> GradeItem:
        """Return how an answer to this row is graded."""
        return self._benchmark.grade(row, answer)
