"""The evaluation in the loop: greedy answers to held-out questions, and how well the verifier judges solutions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.types import Generation
from tango_hpc.questions.tasks import Task
from tango_hpc.stages.responses import ReadSolution, settled
from tango_hpc.stages.role import Generator, Role, Verifier
from tango_hpc.stages.step_metrics import judging_metrics, score_metrics


class HeldOut:
    """Held-out questions, and the solutions of them that the verifier judges every time.

    Those are the generator's greedy answers in the first evaluation, before training. They stay the same, so that a
    change of F1 is a change of the verifier: a generator that improves leaves ever fewer wrong solutions, and other
    ones. Beside that it judges the present generator's, as in the paper's Figure 4.
    """

    def __init__(
        self,
        task: Task,
        questions: Sequence[dict[str, Any]],
        generator: Generator,
        verifier: Verifier | None,
        make_ready: Callable[[Role], None],
    ) -> None:
        """Call `make_ready` with a role before the role generates."""
        self._task, self._generator, self._verifier, self._make_ready = task, generator, verifier, make_ready
        self._questions_Q = [row for row in questions if generator.fits(generator.prompt(task.statement(row)))]
        self.num_questions, self.num_too_long = len(questions), len(questions) - len(self._questions_Q)
        if not self._questions_Q:
            raise CheckFailed(
                f"none of the {len(questions)} evaluation questions fits generator.max_prompt_tokens, "
                f"{generator.settings.max_prompt_tokens}"
            )
        self._prompts_Q = generator.prompts(task, self._questions_Q)
        self._to_judge_Q: list[ReadSolution] = []
        self.answered_Q: list[ReadSolution] = []  # of the last evaluation

    def evaluate(self) -> dict[str, float | None]:
        """Return metrics by key: the generator's greedy pass@1, and scores of the verifier's verdicts and step
        judgements, those of the present generator's solutions as `verifier/present_…`.

        The verifier samples, as it does when it judges in training, with the same seeds every time (the scores:
        `JudgementCounts`). Questions that do not fit the generator's context count as wrong. Collective.
        """
        self.answered_Q = solutions_Q = self._read(
            self._write(self._generator, self._prompts_Q, [0] * len(self._questions_Q), greedy=True)
        )
        values: dict[str, float | None] = {
            "generator/accuracy": sum(answered.correct for answered in solutions_Q) / self.num_questions,
            "generator/response_tokens": statistics.fmean(answered.response.num_tokens for answered in solutions_Q),
            "generator/format_failures": statistics.fmean(
                not answered.solution.well_formed for answered in solutions_Q
            ),
        }
        values |= score_metrics(solutions_Q)
        if self._verifier is not None:
            self._to_judge_Q = self._to_judge_Q or solutions_Q
            scores = self._judged(self._verifier, self._to_judge_Q)
            values |= scores
            if [_tokens(read) for read in solutions_Q] != [_tokens(read) for read in self._to_judge_Q]:
                scores = self._judged(self._verifier, solutions_Q)
            values |= {key.replace("/", "/present_"): value for key, value in scores.items()}
        return values | {"data/not_asked": self.num_too_long}

    def _judged(self, verifier: Verifier, solutions_Q: list[ReadSolution]) -> dict[str, float | None]:
        prompts_Q = verifier.prompts(solutions_Q)
        generations = self._write(verifier, prompts_Q, range(len(solutions_Q)))
        return judging_metrics(self._task, verifier.read(solutions_Q, prompts_Q, generations))

    def _write(
        self, role: Role, prompts_Q: list[list[int]], seeds_Q: Sequence[int], *, greedy: bool = False
    ) -> list[Generation]:
        self._make_ready(role)
        return role.write(prompts_Q, seeds_Q, greedy=greedy)

    def state_dict(self) -> list[list[Any]]:
        """Return token ids and finish reason of the solutions to judge; JSON."""
        generations = [judged.response.generation for judged in self._to_judge_Q]
        return [[generation.token_ids, generation.finish_reason] for generation in generations]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Judge these from now on. Collective: they are graded once more."""
        if state:
            saved_Q = [Generation(token_ids, [], reason) for token_ids, reason in state]
            self._to_judge_Q = self._read(saved_Q)

    def _read(self, generations: list[Generation]) -> list[ReadSolution]:
        return settled(self._generator.read(self._task, self._questions_Q, self._prompts_Q, generations))


def _tokens(read: ReadSolution) -> list[int]:
    return read.response.generation.token_ids
