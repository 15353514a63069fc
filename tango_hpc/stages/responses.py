"""The responses of the roles, as they are read: solutions with grades, verifications with judgements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tango_hpc.base.config.schema import TAGGED, ProtocolConfig
from tango_hpc.base.types import Generation
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.questions.grading.pool import NO_MAJORITY, Verdict
from tango_hpc.questions.protocol.alignment import response_text, step_end_tokens
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.verification import FormatRule, Verification, read_verification
from tango_hpc.questions.tasks import Task
from tango_hpc.stages.sharing import from_shares, in_each, in_shares, my_share

NOT_ASKED = Generation([], [], "length")
# A prompt and what a role wrote to it; the prompt is empty where it was too long to be asked.
Written = tuple[list[int], Generation]


@dataclass(frozen=True)
class Response:
    """The response of a role to a prompt, and its text. A prompt longer than the role's context is not asked: all is
    empty then.
    """

    prompt_ids: list[int]
    generation: Generation
    text: str

    @property
    def was_asked(self) -> bool:
        """Return whether there was room for the prompt."""
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
        """Return how its answer was graded."""
        assert self.graded is not None, "a verdict is asked for before the answer is graded"
        return self.graded

    @property
    def correct(self) -> bool:
        """Return whether the answer is right: the reference, or of a question without one that of the majority."""
        return self.verdict.correct

    @property
    def has_truth(self) -> bool:
        """Return whether the question has an answer."""
        return self.question["answer"] is not None

    @property
    def teaches(self) -> bool:
        """Return whether the answer could be graded: by the question's answer, or by a majority."""
        return self.verdict != NO_MAJORITY


class Grading:
    """Solutions that are graded while a model generates: each process has workers grade a share of them."""

    def __init__(self, task: Task, solutions_N: Sequence[ReadSolution], exchange: Exchange) -> None:
        self._solutions_N, self._exchange, self._settled = solutions_N, exchange, False
        self._mine: Future[list[Verdict]] = Future()
        mine = my_share(exchange, solutions_N)
        known = [(read.question, read.answer) for read in mine if read.has_truth]

        def grade() -> None:
            try:
                verdicts = iter(task.grade_all(known))
                self._mine.set_result([next(verdicts) if read.has_truth else NO_MAJORITY for read in mine])
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


def settled(asked: tuple[list[ReadSolution], Grading]) -> list[ReadSolution]:
    """Return the solutions, once they are graded. Collective."""
    solutions_N, grading = asked
    grading.settle()
    return solutions_N


@dataclass(frozen=True)
class ReadVerification:
    """A verifier's response to a solution, parsed. Nothing is judged where it was not asked."""

    judged: ReadSolution
    response: Response
    verification: Verification


class FailureWatch:
    """Has the first thing that grading or labelling failed at told, once in an attempt."""

    def __init__(self, task: Task) -> None:
        self._task, self._told = task, False

    def observe(self, solutions: Sequence[ReadSolution], when: str, tell: Callable[[str], None]) -> None:
        """Take in solutions that are graded and, where they have labels, labelled; `tell` what failed `when`."""
        failures = [*(read.verdict.error for read in solutions if read.verdict.error), *self._task.complaints]
        if failures and not self._told:
            self._told = True
            tell(f"{when} grading failed; answers count as wrong then, steps have no labels: {failures[0]}")


def read_solutions(
    task: Task, questions_N: Sequence[dict[str, Any]], statements_N: Sequence[str], written_N: Sequence[Written],
    tokenizer: Any, exchange: Exchange, opened: str = "", protocol: ProtocolConfig = TAGGED,
) -> list[ReadSolution]:  # fmt: skip
    """Decode, parse and align each response; nothing is graded yet. Collective: the processes share it.

    `opened`: the tags that the prompt has opened, with which the text of each response begins.
    """

    def read(share: Sequence[Generation]) -> list[tuple[str, Solution, str | None, list[int]]]:
        texts = [opened + response_text(generation.token_ids, tokenizer) for generation in share]
        solutions = [read_solution(text, protocol) for text in texts]
        ends = [
            step_end_tokens(generation.token_ids, tokenizer, [end - len(opened) for end in solution.step_end_chars])
            for generation, solution in zip(share, solutions, strict=True)
        ]
        if protocol.solution == "free":  # whose last step has all tokens that are left, the end of sequence too
            ends = [
                [*ends_K[:-1], len(generation.token_ids) - 1] if ends_K else []
                for ends_K, generation in zip(ends, share, strict=True)
            ]
        return list(zip(texts, solutions, map(task.answer, solutions), ends, strict=True))

    read_N = in_shares(exchange, read, [generation for _, generation in written_N])
    rows = zip(questions_N, statements_N, written_N, read_N, strict=True)
    return [
        ReadSolution(question, statement, Response(*written, text), solution, answer, ends)
        for question, statement, written, (text, solution, answer, ends) in rows
    ]


def read_verifications(
    solutions_N: Sequence[ReadSolution], written_N: Sequence[Written], rule: FormatRule, tokenizer: Any,
    exchange: Exchange, opened: str = "",
) -> list[ReadVerification]:  # fmt: skip
    """Decode each response and parse it as a verification of the solution beside it. Collective, as above."""

    def read(share: Sequence[tuple[Solution, Generation]]) -> list[tuple[str, Verification]]:
        texts = [opened + response_text(generation.token_ids, tokenizer) for _, generation in share]
        return [
            (text, read_verification(text, solution, rule)) for text, (solution, _) in zip(texts, share, strict=True)
        ]

    pairs = list(zip(solutions_N, written_N, strict=True))
    read_N = in_shares(exchange, read, [(judged.solution, generation) for judged, (_, generation) in pairs])
    return [
        ReadVerification(judged, Response(*written, text), verification)
        for (judged, written), (text, verification) in zip(pairs, read_N, strict=True)
    ]
