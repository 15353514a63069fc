"""`tango score`: recompute rewards and advantages of dumped rollouts, with the very functions that training uses.

Needs neither model nor tokenizer nor GPU. Texts are parsed and graded again, and rewards and advantages computed by
the settings of a config, which may name another algorithm than the run had. What only the run knew is taken from the
dump: where steps end in tokens, α of the step (Eq. 7), and the class weights s_± that came from earlier batches (Eq.
9).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import warn_once
from tango_hpc.base.run.dumps import RolloutRow, read_rollouts, write_rollouts
from tango_hpc.method.equations import ClassWeights
from tango_hpc.method.role_schedule import num_trained, role_schedule
from tango_hpc.method.vote import majority_vote
from tango_hpc.questions.grading.pool import NO_MAJORITY, Verdict, parts_as_json
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.questions.tasks import Task, get_task
from tango_hpc.stages.method_files import load_advantages
from tango_hpc.stages.scoring import Moment, ScoredSolution, score_solutions, score_verifications


@dataclass(frozen=True)
class ScoreReport:
    """The changes by re-scoring: rows whose outcome, judgements, verdict or having step rewards differ, and the largest
    differences, where step rewards that a row does not have count as 0."""

    num_rows: int
    num_reread: int
    max_reward_change: float
    max_advantage_change: float


def score_dump(dump: Path, config: Config, out: Path) -> ScoreReport:
    """Read `dump`, score all its rows by `config`, write them to `out`. Raises UserError on what is no sound dump."""
    rows = read_rollouts(dump)
    if not rows:
        raise UserError(f"{dump} has no rows to score")
    try:
        scored = score_rows(rows, config)
    except ValueError as error:
        raise UserError(f"{dump}: {error}") from error
    write_rollouts(out, scored)
    pairs = list(zip(rows, read_rollouts(out), strict=True))  # both in the file's precision
    return ScoreReport(
        num_rows=len(rows),
        num_reread=sum(_reading(old) != _reading(new) for old, new in pairs),
        max_reward_change=max(_change(_rewards(old), _rewards(new)) for old, new in pairs),
        max_advantage_change=max(_change(old.advantages, new.advantages) for old, new in pairs),
    )


def score_rows(rows: Sequence[RolloutRow], config: Config) -> list[RolloutRow]:
    """Return the rows with rewards and advantages computed anew, in their order; each step of each role is one batch.

    Raises ValueError, naming step and role, where a batch does not hold together.
    """
    task = get_task(config.task)
    batches: dict[tuple[int, str], list[int]] = {}
    for index, row in enumerate(rows):
        batches.setdefault((row.step, row.role), []).append(index)
    scored: list[RolloutRow] = list(rows)
    for (step, role), indices in batches.items():
        score = _score_generator if role == "generator" else _score_verifier
        try:
            batch = score([rows[index] for index in indices], task, config)
        except ValueError as error:
            raise ValueError(f"step {step}, {role}: {error}") from error
        for index, row in zip(indices, batch, strict=True):
            scored[index] = row
    return scored


def _score_generator(rows_N: list[RolloutRow], task: Task, config: Config) -> list[RolloutRow]:
    solutions_N = [read_solution(row.response_text, config.protocol) for row in rows_N]
    graded_N = _graded(task, rows_N, solutions_N)
    verifications_N_V = [
        [
            read_verification(text, solution, config.algorithm.verifier_format)
            for text in (row.verification_text, *row.other_verifications)
            if text is not None
        ]
        for row, solution in zip(rows_N, solutions_N, strict=True)
    ]
    votes_N = [majority_vote(read_V) if read_V else None for read_V in verifications_N_V]
    for row, solution, read_V in zip(rows_N, solutions_N, verifications_N_V, strict=True):
        if read_V and len(row.step_end_tokens) != len(solution.steps):
            raise ValueError(
                f"response {row.response_id} has {len(row.step_end_tokens)} step_end_tokens, but its response_text "
                f"has {len(solution.steps)} steps"
            )
    alpha = rows_N[0].alpha
    if alpha is None or any(row.alpha != alpha for row in rows_N):
        raise ValueError(f"the column alpha must hold one number per step, not {[row.alpha for row in rows_N]}")
    result = score_solutions(
        [
            ScoredSolution(
                row.group_id,
                solution,
                verdict.correct,
                verdict.reward,
                row.step_end_tokens,
                len(row.response_ids),
                read_V[0] if read_V else None,
                read_V[1:],
                truncated=len(row.response_ids) == config.generator.max_response_tokens,
            )
            for row, solution, verdict, read_V in zip(rows_N, solutions_N, graded_N, verifications_N_V, strict=True)
        ],
        config.algorithm,
        hook := load_advantages(config, "generator", kept=False),
        _moment(rows_N, config, alpha),
    ).silencing([verdict == NO_MAJORITY for verdict in graded_N])
    return [
        replace(
            row,
            solution_correct=None if row.solution_correct is None else verdict.correct,
            score=verdict.reward,
            reward_parts=parts_as_json(verdict),
            step_judgements=vote.judgements if vote is not None else [],
            final_judgement=vote.final if vote is not None else None,
            outcome_reward=float(result.rewards_N[i]),
            step_rewards=result.step_rewards_N_K[i].tolist(),
            algorithm=hook.name,
            advantages=result.advantages_N_T[i].tolist(),
        )
        for i, (row, verdict, vote) in enumerate(zip(rows_N, graded_N, votes_N, strict=True))
    ]


def _score_verifier(rows_N: list[RolloutRow], task: Task, config: Config) -> list[RolloutRow]:
    for row in rows_N:
        if row.solution_text is None:
            raise ValueError(f"response {row.response_id} has no solution_text: what was judged is not known")
    solutions_N = [read_solution(row.solution_text or "", config.protocol) for row in rows_N]
    graded_N = _graded(task, rows_N, solutions_N)
    correct_N = [verdict.correct for verdict in graded_N]
    verifications_N = [
        read_verification(row.response_text, solution, config.algorithm.verifier_format)
        for row, solution in zip(rows_N, solutions_N, strict=True)
    ]
    weights = ClassWeights(right=_class_weight(rows_N, correct_N, True), wrong=_class_weight(rows_N, correct_N, False))
    hook = load_advantages(config, "verifier", kept=False)
    result = score_verifications(
        [row.group_id for row in rows_N],
        correct_N,
        verifications_N,
        [len(row.response_ids) for row in rows_N],
        weights=weights,
        gamma=config.algorithm.format_weight,
        labels_N_K=[row.step_labels or () for row in rows_N],
        label_weight=labels.weight if (labels := config.algorithm.step_labels) is not None else 0.0,
        hook=hook,
        moment=_moment(rows_N, config),
    ).silencing([verdict == NO_MAJORITY for verdict in graded_N])
    return [
        replace(
            row,
            solution_correct=None if row.solution_correct is None else correct,
            step_judgements=verification.judgements,
            final_judgement=verification.final,
            format_reward=verification.format_reward,
            reward=float(result.rewards_N[i]),
            class_weight=weights.right if correct else weights.wrong,
            algorithm=hook.name,
            advantages=result.advantages_N_T[i].tolist(),
        )
        for i, (row, correct, verification) in enumerate(zip(rows_N, correct_N, verifications_N, strict=True))
    ]


def _moment(rows_N: list[RolloutRow], config: Config, alpha: float = 0.0) -> Moment:
    """Return the moment of the run that the rows are of: the steps of their role before it, and the file's state."""
    role, first = rows_N[0].role, rows_N[0]
    schedule = role_schedule(config)
    return Moment(
        alpha=alpha,
        step=num_trained(schedule[: first.step - 1], role, config),
        total_steps=num_trained(schedule, role, config),
        max_response_tokens=config.roles[role].max_response_tokens,
        state=None if first.state is None else json.loads(first.state),
    )


def _graded(task: Task, rows_N: list[RolloutRow], solutions_N: list[Solution]) -> list[Verdict]:
    """Return the grade of each solution's answer to its row's question; without a gold answer that of the run's
    majority.
    """
    known = [
        (_question(row), task.answer(solution))
        for row, solution in zip(rows_N, solutions_N, strict=True)
        if row.gold_answer is not None
    ]
    graded = iter(task.grade_all(known))
    verdicts_N = [_of_majority(row) if row.gold_answer is None else next(graded) for row in rows_N]
    for error in [verdict.error for verdict in verdicts_N if verdict.error][:1]:
        warn_once(f"grading failed, and the answers count as wrong: {error}")
    return verdicts_N


def _class_weight(rows_N: list[RolloutRow], correct_N: list[bool], right: bool) -> float:
    """Return s_+ or s_− of the step, from the rows that the run gave it to; 1 where no row asks for it."""
    if right not in correct_N:
        return 1.0
    weights = {row.class_weight for row in rows_N if row.solution_correct is right}
    if len(weights) != 1 or None in weights:
        name = "right" if right else "wrong"
        raise ValueError(
            f"class_weight of {name} solutions must be one number, not {sorted(map(str, weights)) or 'absent'}"
        )
    return float(weights.pop() or 0.0)


def _of_majority(row: RolloutRow) -> Verdict:
    """Return the grade that the majority of its group gave a solution in the run; that there was none, where so."""
    return NO_MAJORITY if row.solution_correct is None else Verdict(row.solution_correct)


def _question(row: RolloutRow) -> dict[str, Any]:
    """Return the columns of a question that grading reads."""
    question = {"id": row.question_id, "question": row.question, "answer": row.gold_answer, "source": row.source}
    return question if row.metadata is None else question | {"metadata": row.metadata}


def _reading(row: RolloutRow) -> tuple[object, ...]:
    judged = (tuple(row.step_judgements), row.final_judgement, bool(row.step_rewards))
    return (row.solution_correct, row.outcome_reward, *judged)


def _rewards(row: RolloutRow) -> list[float]:
    return [value or 0.0 for value in (row.outcome_reward, row.reward, row.format_reward, *row.step_rewards)]


def _change(old: Sequence[float], new: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip_longest(old, new, fillvalue=0.0)), default=0.0)
