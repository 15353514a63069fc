"""The evaluation in the loop: greedy answers to held-out questions, and how well the verifier judges them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tango_hpc.protocol.prompts import generator_prompt_ids
from tango_hpc.stages.responses import judge_all, read_solutions
from tango_hpc.stages.role import Role
from tango_hpc.stages.verifier_scores import outcome_f1, step_f1
from tango_hpc.tasks import Task


def evaluate(
    task: Task, questions: Sequence[dict[str, Any]], generator: Role, verifier: Role | None
) -> dict[str, float | None]:
    """Greedy pass@1 of the generator; F1 of the verifier's verdicts and step judgements of those answers.

    The verifier samples, as it does when it judges in training, with the same seeds in every evaluation. F1 is the
    harmonic mean of the accuracies on right and on wrong items (ProcessBench). Questions that do not fit
    the generator's context count as wrong. Collective.
    """
    prompts_N = [generator_prompt_ids(one["question"], generator.tokenizer) for one in questions]
    kept = [i for i, prompt in enumerate(prompts_N) if len(prompt) <= generator.settings.max_prompt_tokens]
    generations = generator.generate([prompts_N[i] for i in kept], [0] * len(kept), greedy=True)
    solutions = read_solutions(task, generator, [questions[i] for i in kept], [prompts_N[i] for i in kept], generations)
    values: dict[str, float | None] = {
        "generator/accuracy": sum(one.correct for one in solutions) / len(questions),
        "generator/response_tokens": statistics.fmean(len(one.generation.token_ids) for one in solutions),
        "generator/format_failures": statistics.fmean(not one.solution.well_formed for one in solutions),
    }
    if verifier is None:
        return values
    judged = judge_all(verifier, solutions, lambda ids: verifier.generate(ids, list(range(len(ids)))))
    labels_N = [task.label_steps(one.question, one.solution.steps) for one in solutions]
    labelled = [
        (labels, one.verification.judgements)
        for labels, one in zip(labels_N, judged, strict=True)
        if labels is not None
    ]
    values["verifier/outcome_f1"] = outcome_f1(
        [one.correct for one in solutions], [one.verification.final for one in judged]
    )
    values["verifier/step_f1"] = step_f1([labels for labels, _ in labelled], [judgements for _, judgements in labelled])
    values["verifier/correct_share"] = statistics.fmean(one.verification.final == 1 for one in judged)
    values["verifier/parse_failures"] = statistics.fmean(one.verification.final == -1 for one in judged)
    return values
