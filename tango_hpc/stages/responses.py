"""What the roles wrote, read: solutions with their grades, verifications with their judgements."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tango_hpc.grading.pool import Verdict
from tango_hpc.parallel.exchange import Exchange
from tango_hpc.protocol.alignment import step_end_tokens
from tango_hpc.protocol.solution import Solution, parse_solution
from tango_hpc.protocol.verification import FormatRule, Verification, read_verification
from tango_hpc.stages.sharing import from_shares, in_each, in_shares, my_share
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


@dataclass
class ReadSolution:
    """A generator's response to a question, parsed and graded; `step_end_tokens` are I(k) of Eq. 3.

    `graded` is None while workers are at it (`Grading`).
    """

    question: dict[str, Any]
    statement: str
    response: Response
    solution: Solution
    answer: str | None
    step_end_tokens: list[int]
    graded: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """How its answer was graded."""
        assert self.graded is not None, "a verdict is asked for before the answer is graded"
        return self.graded

    @property
    def correct(self) -> bool:
        """Eq. 2."""
        return self.verdict.correct


class Grading:
    """Solutions that are graded while a model generates: each process has workers grade a share of them."""

    def __init__(self, task: Task, solutions_N: Sequence[ReadSolution], exchange: Exchange) -> None:
        self._solutions_N, self._exchange, self._settled = solutions_N, exchange, False
        self._mine: Future[list[Verdict]] = Future()
        answers = [(read.question, read.answer) for read in my_share(exchange, solutions_N)]

        def grade() -> None:
            try:
                self._mine.set_result(task.grade_all(answers))
            except BaseException as error:
                self._mine.set_exception(error)  # `settle` raises it

        threading.Thread(target=grade, name="grading", daemon=True).start()

    def settle(self) -> None:
        """Wait until all are graded, if they are not. Collective; raises what the task failed at."""
        if self._settled:
            return
        verdicts_N = from_shares(in_each(self._exchange, self._mine.result))
        for read, verdict in zip(self._solutions_N, verdicts_N, strict=True):
            read.graded = verdict
        self._settled = True


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
    """Parse and align each response; nothing is graded yet. Collective: the processes share it."""

    def read(share: Sequence[Response]) -> list[tuple[Solution, str | None, list[int]]]:
        solutions = [parse_solution(response.text) for response in share]
        answers = [task.answer(response.text) for response in share]
        ends = [
            step_end_tokens(response.generation.token_ids, tokenizer, solution.step_end_chars)
            for response, solution in zip(share, solutions, strict=True)
        ]
        return list(zip(solutions, answers, ends, strict=True))

    rows = zip(questions_N, statements_N, responses_N, in_shares(exchange, read, responses_N), strict=True)
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
