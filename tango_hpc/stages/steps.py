"""One optimizer step of either role: roll out, judge, score, update, bring the new weights to the engine.

Shape legend: N responses of the step, K steps of a solution (ragged), T tokens of a response (ragged).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tango_hpc.advantages import (
    generator_advantages_batch,
    num_right_and_wrong_solutions,
    verifier_advantages_batch,
)
from tango_hpc.equations import alpha_schedule
from tango_hpc.errors import CheckFailed
from tango_hpc.policy.policy import LogprobGapError, LossSettings
from tango_hpc.protocol.prompts import generator_prompt_ids
from tango_hpc.protocol.verification import Verification
from tango_hpc.run.dumps import RolloutRow
from tango_hpc.stages.responses import JudgedSolution, ReadSolution, judge_all, read_solutions
from tango_hpc.stages.role import Role
from tango_hpc.stages.verifier_scores import outcome_f1, step_f1
from tango_hpc.types import Generation, TrainSequence

if TYPE_CHECKING:
    from tango_hpc.stages.tango import Tango


@dataclass(frozen=True)
class StepResult:
    """The metrics of a step (without its number and its seconds), and a way to make the rows of its dump."""

    metrics: dict[str, Any]
    dump_rows: Callable[[int], list[RolloutRow]]


def generator_step(run: Tango) -> StepResult:
    """M solutions of each question, one verification of each, advantages by Eq. 7, one update of the generator."""
    config, M = run.config, run.config.train.rollouts_per_question
    questions_N = [run.questions[index] for index in run.draw_questions() for _ in range(M)]
    solutions_N = solve(run, questions_N)
    judged_N: list[JudgedSolution] | None = None
    if run.verifier is not None:
        judged_N = judge(run, solutions_N)

    with run.clock("score"):
        step_number = run.schedule[: run.step].count("generator")
        start = config.algorithm.alpha_start if judged_N is not None else 0.0
        alpha = alpha_schedule(step_number, run.schedule.count("generator"), start, config.algorithm.alpha_end)
        group_ids_N = [f"{run.step + 1}-{index // M}" for index in range(len(solutions_N))]
        scored = generator_advantages_batch(
            group_ids_N=group_ids_N,
            correct_N=[one.correct for one in solutions_N],
            judgements_N_K=[one.verification.judgements for one in judged_N] if judged_N else [[]] * len(solutions_N),
            step_end_tokens_N_K=[one.step_end_tokens for one in solutions_N] if judged_N else [[]] * len(solutions_N),
            response_lengths_N=[len(one.generation.token_ids) for one in solutions_N],
            alpha=alpha,
            algorithm=config.algorithm.name,
        )
    sequences_N = [
        TrainSequence(one.prompt_ids, one.generation.token_ids, advantages_T.tolist(), one.generation.logprobs)
        for one, advantages_T in zip(solutions_N, scored.advantages_N_T, strict=True)
    ]
    metrics = update_role(run, run.generator, sequences_N)
    metrics |= solution_metrics(solutions_N)
    metrics["alpha"] = alpha
    metrics["generator/outcome_reward"] = float(scored.outcome_rewards_N.mean())
    metrics["tokens/generated"] = sum(len(one.generation.token_ids) for one in solutions_N)
    if judged_N is not None:
        rewards = [float(value) for rewards_K in scored.step_rewards_N_K for value in rewards_K]
        metrics["generator/step_reward"] = statistics.fmean(rewards) if rewards else None
        metrics |= verifier_metrics(run, judged_N)
        metrics["tokens/generated"] += sum(len(one.response_ids) for one in judged_N)

    def dump_rows(step: int) -> list[RolloutRow]:
        return [
            RolloutRow(
                step=step,
                role="generator",
                group_id=group_ids_N[i],
                response_id=f"{group_ids_N[i]}-{i % M}",
                question=one.question["question"],
                gold_answer=one.question["answer"],
                prompt_ids=one.prompt_ids,
                response_ids=one.generation.token_ids,
                response_text=one.text,
                response_logprobs=one.generation.logprobs,
                step_end_tokens=one.step_end_tokens,
                solution_text=one.text,
                solution_correct=one.correct,
                verification_text=judged_N[i].text if judged_N else None,
                step_judgements=judged_N[i].verification.judgements if judged_N else [],
                final_judgement=judged_N[i].verification.final if judged_N else None,
                outcome_reward=float(scored.outcome_rewards_N[i]),
                step_rewards=scored.step_rewards_N_K[i].tolist(),
                alpha=alpha,
                algorithm=config.algorithm.name,
                advantages=scored.advantages_N_T[i].tolist(),
            )
            for i, one in enumerate(solutions_N)
        ]

    return StepResult(metrics, dump_rows)


def verifier_step(run: Tango) -> StepResult:
    """One solution of each question, M verifications of it, advantages by Eq. 9, one update of the verifier."""
    assert run.verifier is not None
    config, M = run.config, run.config.train.rollouts_per_question
    solutions = solve(run, [run.questions[index] for index in run.draw_questions()])
    judged_N = judge(run, [one for one in solutions for _ in range(M)])

    with run.clock("score"):
        group_ids_N = [f"{run.step + 1}-{index // M}" for index in range(len(judged_N))]
        # A solution that is too long for the verifier's context was not judged, and teaches nothing.
        members = [i for i, one in enumerate(judged_N) if one.prompt_ids]
        if not members:
            raise CheckFailed(
                f"none of the {len(solutions)} solutions of step {run.step + 1} fits verifier.max_prompt_tokens = "
                f"{run.verifier.settings.max_prompt_tokens}; raise it, or lower generator.max_response_tokens"
            )
        correct = [judged_N[i].solution.correct for i in members]
        counts = num_right_and_wrong_solutions([group_ids_N[i] for i in members], correct)
        weights = run.class_weights.weights(*counts)
        scored = verifier_advantages_batch(
            group_ids_N=[group_ids_N[i] for i in members],
            solution_correct_N=correct,
            verdicts_N=[judged_N[i].verification.final for i in members],
            format_rewards_N=[judged_N[i].verification.format_reward for i in members],
            response_lengths_N=[len(judged_N[i].response_ids) for i in members],
            weights=weights,
            gamma=config.algorithm.format_weight,
            algorithm=config.algorithm.name,
        )
        run.class_weights.update(*counts)
    sequences_N = [
        TrainSequence(judged_N[i].prompt_ids, judged_N[i].response_ids, advantages_T.tolist(), judged_N[i].logprobs)
        for i, advantages_T in zip(members, scored.advantages_N_T, strict=True)
    ]
    metrics = update_role(run, run.verifier, sequences_N)
    metrics |= solution_metrics(solutions) | verifier_metrics(run, judged_N)
    metrics["verifier/reward"] = float(scored.rewards_N.mean())
    metrics["verifier/class_weight_right"], metrics["verifier/class_weight_wrong"] = weights
    metrics["tokens/generated"] = sum(len(one.generation.token_ids) for one in solutions)
    metrics["tokens/generated"] += sum(len(one.response_ids) for one in judged_N)

    def dump_rows(step: int) -> list[RolloutRow]:
        return [
            RolloutRow(
                step=step,
                role="verifier",
                group_id=group_ids_N[i],
                response_id=f"{group_ids_N[i]}-{i % M}",
                question=judged_N[i].solution.question["question"],
                gold_answer=judged_N[i].solution.question["answer"],
                prompt_ids=judged_N[i].prompt_ids,
                response_ids=judged_N[i].response_ids,
                response_text=judged_N[i].text,
                response_logprobs=judged_N[i].logprobs,
                solution_text=judged_N[i].solution.text,
                solution_correct=judged_N[i].solution.correct,
                step_judgements=judged_N[i].verification.judgements,
                final_judgement=judged_N[i].verification.final,
                format_reward=judged_N[i].verification.format_reward,
                reward=float(scored.rewards_N[place]),
                class_weight=float(scored.class_weights_N[place]),
                algorithm=config.algorithm.name,
                advantages=scored.advantages_N_T[place].tolist(),
            )
            for place, i in enumerate(members)
        ]

    return StepResult(metrics, dump_rows)


# -- the parts that both share ----------------------------------------------------------------------------------


def solve(run: Tango, questions_N: list[dict[str, Any]]) -> list[ReadSolution]:
    """The generator's sampled solution of each question, read and graded."""
    prompts_N = [generator_prompt_ids(one["question"], run.generator.tokenizer) for one in questions_N]
    generations_N = run.generations("rollout", lambda: run.sample(run.generator, prompts_N, "rollout"))
    with run.clock("score"):
        return read_solutions(run.task, run.generator, questions_N, prompts_N, generations_N)


def judge(run: Tango, solutions_N: list[ReadSolution]) -> list[JudgedSolution]:
    """The verifier's sampled verification of each solution, read."""
    assert run.verifier is not None
    verifier = run.verifier

    def sample(prompts: list[list[int]]) -> list[Generation]:
        return run.generations("verify", lambda: run.sample(verifier, prompts, "verify"))

    return judge_all(verifier, solutions_N, sample)


def update_role(run: Tango, role: Role, sequences_N: Sequence[TrainSequence]) -> dict[str, Any]:
    """One optimizer step of Eq. 1 and the weight sync; its metrics."""
    assert role.policy is not None
    policy, algorithm = role.policy, run.config.algorithm
    run.journal.phase("train", role=role.name)
    policy.onload()
    if algorithm.kl_coef > 0:
        with run.clock("logprobs"):
            reference_N = policy.logprobs(sequences_N, reference=True, temperature=role.settings.temperature)
            for sequence, reference_T in zip(sequences_N, reference_N, strict=True):
                sequence.reference_logprobs = reference_T.tolist()
    settings = LossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coef=algorithm.kl_coef,
        importance_cap=algorithm.importance_cap,
        max_logprob_gap=run.config.train.max_logprob_gap,
        temperature=role.settings.temperature,
    )
    num_updates = run.config.train.updates_per_batch
    if num_updates > 1:
        with run.clock("logprobs"):
            old_N = policy.logprobs(sequences_N, temperature=role.settings.temperature)
            for sequence, old_T in zip(sequences_N, old_N, strict=True):
                sequence.old_logprobs = old_T.tolist()
    with run.clock("train"):
        try:
            updates = [policy.update(sequences_N, settings) for _ in range(num_updates)]
        except LogprobGapError as error:
            raise CheckFailed(f"{role.name}: {error}; {role.weight_differences()}") from error
    run.journal.phase("reshard", role=role.name)
    with run.clock("reshard"):
        sync = role.sync_weights()
    mean = statistics.fmean
    return {
        "loss": mean(update.loss for update in updates),
        "grad_norm": mean(update.grad_norm for update in updates),
        "kl": mean(update.kl for update in updates),
        "entropy": mean(update.entropy for update in updates),
        # The first update of a batch has no ratio but 1: nothing can be clipped in it.
        "clip_share": mean(update.clip_share for update in updates[1:]) if num_updates > 1 else None,
        "learning_rate": updates[-1].learning_rate,
        "skipped": any(update.skipped for update in updates),
        "logprob_gap/mean_abs": updates[0].logprob_gap_mean,
        "logprob_gap/max_abs": updates[0].logprob_gap_max,
        "tokens/trained": sum(update.num_tokens for update in updates),
        "reshard/bytes_sent": sync.bytes_sent,
        "reshard/bytes_local": sync.bytes_local,
        "reshard/bytes_minimum": sync.bytes_minimum,
    }


def solution_metrics(solutions_N: Sequence[ReadSolution]) -> dict[str, float]:
    """What the sampled solutions of a step are like."""
    mean = statistics.fmean
    return {
        "generator/accuracy": mean(one.correct for one in solutions_N),
        "generator/response_tokens": mean(len(one.generation.token_ids) for one in solutions_N),
        "generator/num_steps": mean(len(one.solution.steps) for one in solutions_N),
        "generator/truncated_share": mean(one.generation.finish_reason == "length" for one in solutions_N),
        "generator/format_failures": mean(not one.solution.well_formed for one in solutions_N),
    }


def verifier_metrics(run: Tango, judged_N: Sequence[JudgedSolution]) -> dict[str, float | None]:
    """How the sampled verifications of a step fit the truth."""
    mean = statistics.fmean
    verifications: list[Verification] = [one.verification for one in judged_N]
    labelled = [(one, run.task.label_steps(one.solution.question, one.solution.solution.steps)) for one in judged_N]
    labelled_K = [(one.verification.judgements, labels) for one, labels in labelled if labels is not None]
    return {
        "verifier/outcome_f1": outcome_f1([one.solution.correct for one in judged_N], [v.final for v in verifications]),
        "verifier/step_f1": step_f1([labels for _, labels in labelled_K], [j for j, _ in labelled_K]),
        "verifier/correct_share": mean(v.final == 1 for v in verifications),
        "verifier/parse_failures": mean(v.final == -1 for v in verifications),
        "verifier/missing_judgements": mean([j == 0 for v in verifications for j in v.judgements] or [0.0]),
        "verifier/format_reward": mean(v.format_reward for v in verifications),
        "verifier/response_tokens": mean(len(one.response_ids) for one in judged_N),
        "verifier/prompts_too_long": mean(not one.prompt_ids for one in judged_N),
    }
