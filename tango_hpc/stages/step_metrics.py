"""The metrics of a step's solutions and verifications.

Shape suffixes: `base.types`.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence

from tango_hpc.method.dynamic_sampling import groups_with_signal
from tango_hpc.method.equations import FloatArray
from tango_hpc.questions.tasks import Task
from tango_hpc.stages.judgement_counts import JudgementCounts, outcome_counts, step_counts
from tango_hpc.stages.responses import ReadSolution, ReadVerification

Metrics = dict[str, float | None]


def solution_metrics(solutions_N: Sequence[ReadSolution]) -> Metrics:
    """Return the metrics of a step's sampled solutions."""
    mean = statistics.fmean
    known = [read.correct for read in solutions_N if read.has_truth]
    return (
        _agreement(solutions_N)
        | {
            "generator/accuracy": mean(known) if known else None,
            "generator/prompt_tokens": mean(len(read.response.prompt_ids) for read in solutions_N),
            "generator/response_tokens": mean(read.response.num_tokens for read in solutions_N),
            "generator/num_steps": mean(len(read.solution.steps) for read in solutions_N),
            "generator/truncated_share": mean(
                read.response.generation.finish_reason == "length" for read in solutions_N
            ),
            "generator/format_failures": mean(not read.solution.well_formed for read in solutions_N),
            "generator/not_graded": mean(read.teaches and read.verdict.outcome != "graded" for read in solutions_N),
        }
        | score_metrics(solutions_N)
    )


def _agreement(solutions_N: Sequence[ReadSolution]) -> Metrics:
    """Return how many solutions of questions without an answer agree with a majority, and how many have none."""
    unknown = [read for read in solutions_N if not read.has_truth]
    if not unknown:
        return {}
    voted = [read.correct for read in unknown if read.teaches]
    return {
        "generator/agreement": statistics.fmean(voted) if voted else None,
        "generator/without_majority": 1 - len(voted) / len(unknown),
    }


def score_metrics(solutions_N: Sequence[ReadSolution]) -> Metrics:
    """Return the means of scores and their parts, where the task scores answers; each part over those that have it."""
    verdicts_N = [read.verdict for read in solutions_N]
    if all(verdict.score is None for verdict in verdicts_N):
        return {}
    names = sorted({name for verdict in verdicts_N for name in verdict.parts})
    parts = {
        f"reward_parts/{name}": statistics.fmean(one.parts[name] for one in verdicts_N if name in one.parts)
        for name in names
    }
    return {"generator/score": statistics.fmean(verdict.reward for verdict in verdicts_N), **parts}


def judging_metrics(task: Task, read_N: Sequence[ReadVerification]) -> Metrics:
    """Return how verdicts and step judgements fit the truth, where the question has an answer."""
    known = [read for read in read_N if read.judged.has_truth]
    labels_N_K = task.label_all([(read.judged.question, read.judged.solution.steps) for read in known])
    labelled = [
        (labels_K, read.verification.judgements)
        for labels_K, read in zip(labels_N_K, known, strict=True)
        if labels_K is not None
    ]
    outcome = _verdict_counts(read_N)
    steps = step_counts([labels_K for labels_K, _ in labelled], [given_K for _, given_K in labelled])
    verdicts_N = [read.verification.final for read in read_N]
    return {
        "verifier/outcome_f1": outcome.f1,
        "verifier/step_f1": steps.f1,
        "verifier/outcome_pr_f1": outcome.pr_f1,
        "verifier/step_pr_f1": steps.pr_f1,
        "verifier/outcome_j": outcome.j,
        "verifier/step_j": steps.j,
        "verifier/correct_share": statistics.fmean(verdict == 1 for verdict in verdicts_N),
        "verifier/parse_failures": statistics.fmean(verdict == -1 for verdict in verdicts_N),
    }


def verdict_counts(read_N: Sequence[ReadVerification]) -> JudgementCounts:
    """Return how final verdicts fit the truth, of the solutions that the verifier was asked about."""
    return _verdict_counts(were_asked(read_N))


def were_asked(read_N: Sequence[ReadVerification]) -> list[ReadVerification]:
    """Return the verifications whose prompt was not too long."""
    return [read for read in read_N if read.response.was_asked]


def _verdict_counts(read_N: Sequence[ReadVerification]) -> JudgementCounts:
    """Count the verdicts on solutions of questions that have an answer."""
    known = [read for read in read_N if read.judged.has_truth]
    return outcome_counts([read.judged.correct for read in known], [read.verification.final for read in known])


def verification_metrics(task: Task, read_N: Sequence[ReadVerification]) -> Metrics:
    """Return the metrics of a step's sampled verifications; those with too long a prompt enter a count alone."""
    mean = statistics.fmean
    metrics: Metrics = {"verifier/prompts_too_long": mean(not read.response.was_asked for read in read_N)}
    asked_N = were_asked(read_N)
    if not asked_N:
        return metrics
    judgements = [judgement for read in asked_N for judgement in read.verification.judgements]
    return (
        metrics
        | judging_metrics(task, asked_N)
        | {
            "verifier/missing_judgements": mean([judgement == 0 for judgement in judgements] or [0.0]),
            "verifier/format_reward": mean(read.verification.format_reward for read in asked_N),
            "verifier/prompt_tokens": mean(len(read.response.prompt_ids) for read in asked_N),
            "verifier/response_tokens": mean(read.response.num_tokens for read in asked_N),
        }
    )


def signal_share(group_ids_N: Sequence[Hashable], advantages_N_T: Sequence[FloatArray]) -> float:
    """Return the share of groups in which some token has an advantage other than 0: the others teach nothing."""
    return len(groups_with_signal(group_ids_N, advantages_N_T)) / len(set(group_ids_N))
