"""What the roles wrote, read: solutions with their grades, verifications with their judgements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tango_hpc.grading.pool import Verdict
from tango_hpc.parallel.exchange import Exchange
from tango_hpc.protocol.alignment import step_end_tokens
from tango_hpc.protocol.solution import Solution, parse_solution
from tango_hpc.protocol.verification import FormatRule, Verification, read_verification
from tango_hpc.stages.sharing import in_shares
from tango_hpc.tasks import Task
from tango_hpc.types import Generation

NOT_ASKED = Generation([], [], "length")


@dataclass(frozen=True)
class Response:
    """What a role wrote to a prompt, and how it reads. A prompt longer than the role's context is not asked: all is
    empty then.
    """

    prompt_ids: list[int]
    generation: Generation
    text: str

    @property
    def was_asked(self) -> bool:
        """Whether there was room for the prompt."""
        return bool(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the response."""
        return len(self.generation.token_ids)


@dataclass(frozen=True)
class ReadSolution:
    """A generator's response to a question, parsed and graded; `step_end_tokens` are I(k) of Eq. 3."""

    question: dict[str, Any]
    statement: str
    response: Response
    solution: Solution
    answer: str | None
    step_end_tokens: list[int]
    verdict: Verdict

    @property
    def correct(self) -> bool:
        """Eq. 2."""
        return self.verdict.correct


@dataclass(frozen=True)
class ReadVerification:
    """A verifier's response to a solution, parsed. Nothing is judged where it was not asked."""

    judged: ReadSolution
    response: Response
    verification: Verification


class FailureWatch:
    """Names the first thing that grading or labelling failed at, once in an attempt."""

    def __init__(self) -> None:
        self._told = False

    def observe(self, task: Task, solutions: Sequence[ReadSolution]) -> str | None:
        """Take in a step; what failed, None where nothing did or it was said."""
        failures = [*(read.verdict.error for read in solutions if read.verdict.error), *task.complaints]
        if not failures or self._told:
            return None
        self._told = True
        return failures[0]


def read_solutions(
    task: Task, questions_N: Sequence[dict[str, Any]], statements_N: Sequence[str], responses_N: Sequence[Response],
    tokenizer: Any, exchange: Exchange,
) -> list[ReadSolution]:  # fmt: skip
    """Parse, align and grade each response. Collective: the processes share it."""

    def read(
        share: Sequence[tuple[dict[str, Any], Response]],
    ) -> list[tuple[Solution, str | None, list[int], Verdict]]:
        solutions = [parse_solution(response.text) for _, response in share]
        answers = [task.answer(response.text) for _, response in share]
        ends = [
            step_end_tokens(response.generation.token_ids, tokenizer, solution.step_end_chars)
            for (_, response), solution in zip(share, solutions, strict=True)
        ]
        asked = [question for question, _ in share]
        return list(zip(solutions, answers, ends, task.grade_all(list(zip(asked, answers, strict=True))), strict=True))

    read_N = in_shares(exchange, read, list(zip(questions_N, responses_N, strict=True)))
    rows = zip(questions_N, statements_N, responses_N, read_N, strict=True)
    return [ReadSolution(question, statement, response, *read) for question, statement, response, read in rows]


def read_verifications(
    solutions_N: Sequence[ReadSolution], responses_N: Sequence[Response], rule: FormatRule, exchange: Exchange
) -> list[ReadVerification]:
    """Parse each response as a verification of the solution beside it. Collective: the processes share it."""

    def read(share: Sequence[tuple[Solution, str]]) -> list[Verification]:
        return [read_verification(text, solution, rule) for solution, text in share]

    pairs = list(zip(solutions_N, responses_N, strict=True))
    read_N = in_shares(exchange, read, [(judged.solution, response.text) for judged, response in pairs])
    return [ReadVerification(judged, response, read) for (judged, response), read in zip(pairs, read_N, strict=True)]
