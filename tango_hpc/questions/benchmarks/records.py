"""One row for each answer of an evaluation, in Parquet, and what is computed from a benchmark's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.base.files import write_parquet
from tango_hpc.questions.benchmarks import estimates as metrics
from tango_hpc.questions.benchmarks.estimates import Estimate

GREEDY = -1  # sample index of the greedy answer


@dataclass
class Answer:
    """A response to one question. `cluster` numbers the different answers to a question, -1 is no answer.

    sample: GREEDY or the index of a sample. verdict: 1, 0, -1 for no verdict, None where nothing was verified.
    asked: whether the prompt had room in the context of who is asked, the verifier for ProcessBench; if not, all is
    empty and it counts as wrong. score: the verifier's, in [0, 1]. step_labels: gold labels, where the set has them.
    steps: the texts of the steps of `response`, as they were judged.
    For ProcessBench `answer` is the first step judged wrong and `gold` the label.
    """

    question_id: str
    question: str
    gold: str
    sample: int
    response: str
    num_tokens: int
    finished: bool
    well_formed: bool
    answer: str | None
    correct: bool
    outcome: str = "graded"
    cluster: int = -1
    verification: str | None = None
    verdict: int | None = None
    step_judgements: list[int] = field(default_factory=list)
    step_labels: list[int] = field(default_factory=list)
    score: float | None = None
    split: str = ""
    asked: bool = True
    steps: list[str] = field(default_factory=list)


SCHEMA = pa.schema(
    [
        ("question_id", pa.string()), ("question", pa.string()), ("gold", pa.string()), ("sample", pa.int32()),
        ("response", pa.string()), ("num_tokens", pa.int32()), ("finished", pa.bool_()), ("well_formed", pa.bool_()),
        ("answer", pa.string()), ("correct", pa.bool_()), ("outcome", pa.string()), ("cluster", pa.int32()),
        ("verification", pa.string()), ("verdict", pa.int8()), ("step_judgements", pa.list_(pa.int8())),
        ("step_labels", pa.list_(pa.int8())), ("score", pa.float64()), ("split", pa.string()),
        ("asked", pa.bool_()), ("steps", pa.list_(pa.string())),
    ]
)  # fmt: skip
assert SCHEMA.names == [column.name for column in fields(Answer)]


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write whole or not at all."""
    write_parquet(path, pa.Table.from_pylist([asdict(answer) for answer in answers], SCHEMA))


def read_answers(path: Path) -> list[Answer]:
    """Return the answers that `write_answers` wrote."""
    return [Answer(**row) for row in pq.read_table(path).to_pylist()]


def generator_estimates(answers: Sequence[Answer]) -> dict[str, Estimate]:
    """Return every number of a generator benchmark that its answers allow; keys as in the table: `pass@1`, `maj@16`,
    ...
    """
    greedy = [answer for answer in answers if answer.sample == GREEDY]
    verified = [answer for answer in answers if answer.verdict is not None]
    judged = [(answer.question_id, answer.correct, answer.verdict == answer.correct) for answer in verified]
    labelled = [
        (answer.question_id, label == 1, label == judgement)
        for answer in verified
        for label, judgement in zip(answer.step_labels, answer.step_judgements, strict=False)
    ]
    return _known(
        {
            "pass@1": metrics.share([answer.correct for answer in greedy]),
            **_sample_estimates(_samples(answers)),
            "verifier F1": metrics.harmonic_mean_f1(judged),
            "verifier step F1": metrics.harmonic_mean_f1(labelled),
        }
    )


def _sample_estimates(samples_Q_M: list[list[Answer]]) -> dict[str, Estimate]:
    """Return estimates from the samples: their mean, the chance of a right one among k, and the result of each vote."""
    if not samples_Q_M:
        return {}
    S = len(samples_Q_M[0])
    correct_Q_M = [[answer.correct for answer in samples] for samples in samples_Q_M]
    estimates = {f"avg@{S}": metrics.mean([sum(correct) / S for correct in correct_Q_M])}
    for k in _powers_of_two(S)[1:]:  # the first is avg@S
        estimates[f"pass@{k} of {S}"] = metrics.mean([metrics.pass_at_k(correct, k) for correct in correct_Q_M])
    return estimates | {
        name: metrics.share(_picked(correct_Q_M, winners_Q)) for name, winners_Q in _winners(samples_Q_M, S).items()
    }


def _winners(samples_Q_M: list[list[Answer]], S: int) -> dict[str, Iterable[int | None]]:
    """Return the sample that wins each question, by way to vote; the verifier votes where it scored every sample."""
    clusters_Q_M = [[answer.cluster for answer in samples] for samples in samples_Q_M]
    scores_Q_M = [[answer.score for answer in samples if answer.score is not None] for samples in samples_Q_M]
    winners: dict[str, Iterable[int | None]] = {f"maj@{S}": map(metrics.majority_vote, clusters_Q_M)}
    if list(map(len, scores_Q_M)) == list(map(len, samples_Q_M)):
        winners[f"best of {S}"] = map(metrics.best_of, scores_Q_M)
        winners[f"weighted vote@{S}"] = map(metrics.majority_vote, clusters_Q_M, scores_Q_M)
    return winners


def _known(estimates: Mapping[str, Estimate | None]) -> dict[str, Estimate]:
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def verifier_estimates(answers: Sequence[Answer]) -> dict[str, Estimate]:
    """Return ProcessBench's F1 of each split and their mean, with the two accuracies behind each."""
    estimates: dict[str, Estimate | None] = {}
    sets = []
    for split in dict.fromkeys(answer.split for answer in answers):
        chosen = [answer for answer in answers if answer.split == split]
        sets.append([(answer.question_id, answer.gold == "-1", answer.correct) for answer in chosen])
        estimates[f"F1 {split}"] = metrics.harmonic_mean_f1(sets[-1])
        for name, wanted in (("right", True), ("wrong", False)):
            of_class = [hit for _, is_right, hit in sets[-1] if is_right == wanted]
            estimates[f"accuracy on {name} {split}"] = metrics.share(of_class) if of_class else None
    if len(sets) > 1:
        estimates["F1 average"] = metrics.harmonic_mean_f1(*sets)
    return _known(estimates)


def facts(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return further facts of a benchmark's answers: questions that were too long to be asked, form, length, cut-off
    answers, grading that hit a limit.
    """
    count = len(answers)
    limits = [answer.outcome for answer in answers if answer.outcome != "graded"]
    return {
        "answers": count,
        "not_asked": sum(not answer.asked for answer in answers if answer.sample == GREEDY),
        "well_formed": sum(answer.well_formed for answer in answers) / count,
        "without_answer": sum(answer.answer is None for answer in answers) / count,
        "cut_off": sum(answer.asked and not answer.finished for answer in answers) / count,
        "mean_tokens": sum(answer.num_tokens for answer in answers) / count,
        "grading_limits": {name: limits.count(name) for name in sorted(set(limits))},
    }


def _samples(answers: Sequence[Answer]) -> list[list[Answer]]:
    by_question: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.sample != GREEDY:
            by_question.setdefault(answer.question_id, []).append(answer)
    return [sorted(samples, key=lambda answer: answer.sample) for samples in by_question.values()]


def _picked(correct_Q_M: Sequence[Sequence[bool]], chosen_Q: Iterable[int | None]) -> list[bool]:
    return [index is not None and correct[index] for correct, index in zip(correct_Q_M, chosen_Q, strict=True)]


def _powers_of_two(limit: int) -> list[int]:
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
    return sorted({*powers, limit})
