"""A benchmark: how its rows are asked, where the answer stands in a response, and how the answer is graded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tango_hpc.questions.grading.pool import GradeItem
from tango_hpc.questions.protocol.solution import Solution, find_answer

QuestionRow = Mapping[str, Any]  # of a prepared Parquet file: id, question, answer, source, metadata
Statement = Callable[[QuestionRow], str]
Grade = Callable[[QuestionRow, str], GradeItem]


def question_alone(row: QuestionRow) -> str:
    """Return the question as it stands, for sets whose questions say all."""
    return row["question"]


def question_with(request: str) -> Statement:
    """Return the question with a request for the form of the answer under it, the same for all rows."""
    return lambda row: f"{row['question']}\n\n{request}"


def graded_by(rule: str, **options: object) -> Grade:
    """Return a grader that applies one rule of `grading.rules` with the same options to all rows."""
    return lambda row, answer: GradeItem(rule, row["answer"], answer, dict(options))


math_item = graded_by("math")


@dataclass(frozen=True)
class Benchmark:
    """One evaluation set.

    group: "math" and "out_of_domain" are averaged in the paper's tables; "verifier" asks the verifier, not the
    generator. statement: what a model is asked for a row. extract: the answer in a response, None where there is
    none. grade: the item that the grading pool decides.
    """

    name: str
    title: str
    group: Literal["math", "out_of_domain", "verifier"]
    statement: Statement = question_alone
    extract: Callable[[Solution], str | None] = find_answer
    grade: Grade = math_item
