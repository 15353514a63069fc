"""From generations to what the equations need: solutions read and graded, verifications read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tango_hpc.protocol.alignment import response_text, step_end_tokens
from tango_hpc.protocol.prompts import verifier_prompt_ids
from tango_hpc.protocol.solution import Solution, parse_solution
from tango_hpc.protocol.verification import Verification, parse_verification
from tango_hpc.stages.role import Role
from tango_hpc.stages.sharing import on_all_ranks
from tango_hpc.tasks import Task
from tango_hpc.types import Generation


@dataclass(frozen=True)
class ReadSolution:
    """A generator's response to a question, parsed and graded; `step_end_tokens` are I(k) of Eq. 3."""

    question: dict[str, Any]
    prompt_ids: list[int]
    generation: Generation
    text: str
    solution: Solution
    step_end_tokens: list[int]
    correct: bool


@dataclass(frozen=True)
class JudgedSolution:
    """A solution with one verification of it. All is empty or missing where the verifier's context is too short."""

    solution: ReadSolution
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    text: str
    verification: Verification


def read_solutions(
    task: Task,
    generator: Role,
    questions_N: Sequence[dict[str, Any]],
    prompts_N: Sequence[list[int]],
    generations_N: Sequence[Generation],
) -> list[ReadSolution]:
    """Parse, align and grade each response. Collective: the ranks share the grading."""
    texts_N = [response_text(one.token_ids, generator.tokenizer) for one in generations_N]
    solutions_N = [parse_solution(text) for text in texts_N]
    answers_N = list(zip(questions_N, [one.answer for one in solutions_N], strict=True))
    correct_N = on_all_ranks(task.grade_all, answers_N)
    ends_N = [
        step_end_tokens(generation.token_ids, generator.tokenizer, solution.step_end_chars)
        for generation, solution in zip(generations_N, solutions_N, strict=True)
    ]
    rows = zip(questions_N, prompts_N, generations_N, texts_N, solutions_N, ends_N, correct_N, strict=True)
    return [ReadSolution(*row) for row in rows]


def judge_all(
    verifier: Role,
    solutions_N: Sequence[ReadSolution],
    generate: Callable[[list[list[int]]], list[Generation]],
) -> list[JudgedSolution]:
    """One verification of each solution, read; `generate` completes the prompts that fit the verifier's context."""
    prompts_N = [
        verifier_prompt_ids(one.question["question"], one.text, len(one.solution.steps), verifier.tokenizer)
        for one in solutions_N
    ]
    fits_N = [len(prompt) <= verifier.settings.max_prompt_tokens for prompt in prompts_N]
    generations = iter(generate([prompt for prompt, fits in zip(prompts_N, fits_N, strict=True) if fits]))
    judged_N = []
    for one, prompt, fits in zip(solutions_N, prompts_N, fits_N, strict=True):
        generation = next(generations) if fits else Generation([], [], "length")
        text = response_text(generation.token_ids, verifier.tokenizer)
        verification = parse_verification(text, len(one.solution.steps))
        judged_N.append(
            JudgedSolution(one, prompt if fits else [], generation.token_ids, generation.logprobs, text, verification)
        )
    return judged_N
