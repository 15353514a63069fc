"""Mathematics: questions of any prepared set, graded as its source is, by default as mathematics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tango_hpc.questions import benchmarks
from tango_hpc.questions.benchmarks.base import math_item
from tango_hpc.questions.data.prepare.readers import DATA_SETS
from tango_hpc.questions.grading.pool import GradeItem, GradingPool, Verdict
from tango_hpc.questions.tasks.base import PlainQuestions


class Math(PlainQuestions):
    """The task. Questions are asked as they stand; rows of a benchmark are graded as that benchmark says.

    Grading runs in worker processes that start with the first answer that needs one; `pool.outcomes` counts what
    became of all answers (time, memory, ...).
    """

    name = "math"

    def __init__(self, pool: GradingPool | None = None) -> None:
        self.pool = pool or GradingPool()

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Name the sources that no rule is known for."""
        unknown = Counter(row["source"] for row in rows if row["source"] not in (*benchmarks.NAMES, *DATA_SETS))
        return [
            f"{count:,} of {len(rows):,} questions have the source {source!r}, which names no data set: they are graded"
            " as mathematics (docs/data.md has the sources and their rules; 'math' says so)"
            for source, count in unknown.most_common(5)
        ]

    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[Verdict]:
        """Return whether each answer is right; no answer is wrong. The result does not depend on the other answers."""
        given = [(index, row, answer) for index, (row, answer) in enumerate(answers) if answer is not None]
        graded = self.pool.grade([self.item(row, answer) for _, row, answer in given])
        verdicts = [Verdict(False)] * len(answers)
        for (index, _, _), verdict in zip(given, graded, strict=True):
            verdicts[index] = verdict
        return verdicts

    def item(self, row: Mapping[str, Any], answer: str) -> GradeItem:
        """Return how an answer to this row is graded."""
        if row["source"] in benchmarks.NAMES:
            return benchmarks.get_benchmark(row["source"]).grade(row, answer)
        return math_item(row, answer)
