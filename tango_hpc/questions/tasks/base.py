"""The interface of a task: questions, the grading of answers, and gold labels of steps where they exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tango_hpc.questions.grading.pool import Verdict
from tango_hpc.questions.protocol.solution import Solution, Step, find_answer


class Task(Protocol):
    """One kind of question. A question is a row of a data set: id, question, answer, source."""

    name: str
    complaints: Sequence[str]  # the first thing that `label_all` could not do

    def statement(self, row: Mapping[str, Any]) -> str:
        """Return the question of a row as the model reads it."""
        ...

    def answer(self, solution: Solution) -> str | None:
        """Return the answer in a response; None where there is none."""
        ...

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return what a user should know of how these questions are graded, a line each."""
        ...

    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[Verdict]:
        """Eq. 2 for each (question row, extracted answer); no answer is wrong."""
        ...

    def same_all(self, pairs: Sequence[tuple[dict[str, Any], str, str]]) -> list[bool]:
        """For each (question row, answer, other answer) whether they count as one answer in a vote."""
        ...

    def label_all(self, solutions: Sequence[tuple[dict[str, Any], Sequence[Step]]]) -> list[list[int] | None]:
        """For each (question row, steps) the gold label of each step, +1 right or −1 wrong; None where there is none.

        A step is judged on its own, given what the steps before it say, as the verifier's prompt asks.
        """
        ...


class PlainQuestions(ABC):
    """Of a task whose questions say all, whose answers stand where `find_answer` looks, and whose steps have no
    labels.
    """

    complaints: Sequence[str] = ()

    def statement(self, row: Mapping[str, Any]) -> str:
        """Return the question as it stands."""
        return row["question"]

    def answer(self, solution: Solution) -> str | None:
        """Return the answer in the solution's form, or else the last box."""
        return find_answer(solution)

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return nothing: all questions are graded alike."""
        return []

    @abstractmethod
    def grade_all(self, answers: Sequence[tuple[dict[str, Any], str | None]]) -> list[Verdict]:
        """Eq. 2 for each (question row, extracted answer); no answer is wrong."""

    def same_all(self, pairs: Sequence[tuple[dict[str, Any], str, str]]) -> list[bool]:
        """Return whether the other answer would be right if the first were the reference."""
        graded = self.grade_all([({**row, "answer": first}, second) for row, first, second in pairs])
        return [verdict.correct for verdict in graded]

    def label_all(self, solutions: Sequence[tuple[dict[str, Any], Sequence[Step]]]) -> list[list[int] | None]:
        """Return None for each solution: the task has no labels."""
        return [None] * len(solutions)
