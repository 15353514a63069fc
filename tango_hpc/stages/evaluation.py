"""The evaluation in the loop: greedy answers to held-out questions, and how well the verifier judges solutions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tango_hpc.errors import CheckFailed
from tango_hpc.protocol.prompts import generator_prompt_ids
from tango_hpc.stages.responses import ReadSolution, judge_all, read_solutions
from tango_hpc.stages.role import Role
from tango_hpc.stages.verifier_scores import outcome_f1, step_f1
from tango_hpc.tasks import Task
from tango_hpc.types import Generation


class Evaluation:
    """Held-out questions, and the solutions of them that the verifier judges every time.

    Those are the generator's greedy answers in the first evaluation, before training. They stay the same, so that a
    change of F1 is a change of the verifier: a generator that improves leaves ever fewer wrong solutions, and other
    ones. How the verifier judges the generator of the day is in every step's metrics.
    """

    def __init__(self, task: Task, questions: Sequence[dict[str, Any]], generator: Role, verifier: Role | None) -> None:
        self._task, self._generator, self._verifier = task, generator, verifier
        prompts_N = [generator_prompt_ids(one["question"], generator.tokenizer) for one in questions]
        kept = [i for i, prompt in enumerate(prompts_N) if len(prompt) <= generator.settings.max_prompt_tokens]
        if not kept:
            limit = generator.settings.max_prompt_tokens
            raise CheckFailed(
                f"none of the {len(questions)} evaluation questions fits generator.max_prompt_tokens, {limit}"
            )
        self.num_questions, self.num_too_long = len(questions), len(questions) - len(kept)
        self._questions_K, self._prompts_K = [questions[i] for i in kept], [prompts_N[i] for i in kept]
        self._to_judge_K: list[ReadSolution] = []

    def run(self) -> dict[str, float | None]:
        """Metrics by key: the generator's greedy pass@1, and F1 of the verifier's verdicts and step judgements.

        The verifier samples, as it does when it judges in training, with the same seeds every time. F1 is the
        harmonic mean of the accuracies on right and on wrong items (ProcessBench). Questions that do not fit the
        generator's context count as wrong. Collective.
        """
        generations_K = self._generator.generate(self._prompts_K, [0] * len(self._prompts_K), greedy=True)
        solutions_K = self._read(generations_K)
        values: dict[str, float | None] = {
            "generator/accuracy": sum(one.correct for one in solutions_K) / self.num_questions,
            "generator/response_tokens": statistics.fmean(len(one.generation.token_ids) for one in solutions_K),
            "generator/format_failures": statistics.fmean(not one.solution.well_formed for one in solutions_K),
        }
        if self._verifier is None:
            return values
        self._to_judge_K = self._to_judge_K or solutions_K
        return values | self._judge(self._verifier)

    def state_dict(self) -> list[list[Any]]:
        """Token ids and finish reason of the solutions to judge; JSON."""
        return [[one.generation.token_ids, one.generation.finish_reason] for one in self._to_judge_K]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Judge these from now on. Collective: they are graded once more."""
        if state:
            self._to_judge_K = self._read([Generation(ids, [], reason) for ids, reason in state])

    def _read(self, generations_K: Sequence[Generation]) -> list[ReadSolution]:
        return read_solutions(self._task, self._generator, self._questions_K, self._prompts_K, generations_K)

    def _judge(self, verifier: Role) -> dict[str, float | None]:
        solutions_K = self._to_judge_K
        judged_K = judge_all(verifier, solutions_K, lambda ids: verifier.generate(ids, list(range(len(ids)))))
        labels_K = [self._task.label_steps(one.question, one.solution.steps) for one in solutions_K]
        labelled = [
            (labels, one.verification.judgements)
            for labels, one in zip(labels_K, judged_K, strict=True)
            if labels is not None
        ]
        verdicts_K = [one.verification.final for one in judged_K]
        return {
            "verifier/outcome_f1": outcome_f1([one.correct for one in solutions_K], verdicts_K),
            "verifier/step_f1": step_f1([labels for labels, _ in labelled], [given for _, given in labelled]),
            "verifier/correct_share": statistics.fmean(verdict == 1 for verdict in verdicts_K),
            "verifier/parse_failures": statistics.fmean(verdict == -1 for verdict in verdicts_K),
        }
