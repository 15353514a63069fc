"""Grades of solutions of questions without an answer, by the majority of their group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from tango_hpc.method.majority import numbered_answers, winner
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.questions.grading.pool import NO_MAJORITY, Verdict
from tango_hpc.questions.tasks import Task
from tango_hpc.stages.responses import ReadSolution
from tango_hpc.stages.sharing import in_shares


def grade_by_majority(
    groups: Sequence[Sequence[ReadSolution]],
    counts: Sequence[Sequence[bool]],
    least_share: float,
    task: Task,
    exchange: Exchange,
) -> None:
    """Grade the solutions of each group whose question has no answer; groups with one stay as they are. Collective.

    `counts` says whose vote counts.
    """
    unknown = [(group, of_group) for group, of_group in zip(groups, counts, strict=True) if not group[0].has_truth]
    pairs = [
        (group[0].question, *pair)
        for group, _ in unknown
        for pair in combinations(sorted({read.answer for read in group if read.answer is not None}), 2)
    ]
    found = in_shares(exchange, task.same_all, pairs)
    same = {(question["id"], *pair) for (question, *pair), is_one in zip(pairs, found, strict=True) if is_one}
    for group, of_group in unknown:
        alike = {(first, second) for name, first, second in same if name == group[0].question["id"]}
        answers_M = numbered_answers([read.answer for read in group], alike)
        label = winner(answers_M, of_group, least_share)
        for read, answer in zip(group, answers_M, strict=True):
            read.graded = NO_MAJORITY if label is None else Verdict(answer == label)
