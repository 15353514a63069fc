"""What a step of either role learns from: responses, what the equations give for them, metrics, dump rows.

Shape legend: N responses of the step, V verifications of a solution, K steps of a solution (ragged), T tokens of a response (ragged).
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tango_hpc.advantages import (
    GeneratorAdvantages,
    VerifierAdvantages,
    num_right_and_wrong_solutions,
    verifier_advantages_batch,
)
from tango_hpc.config import Config
from tango_hpc.equations import Algorithm, ClassWeightEma, ClassWeights, FloatArray
from tango_hpc.errors import CheckFailed
from tango_hpc.run.dumps import RolloutRow
from tango_hpc.stages.responses import ReadSolution, ReadVerification, Response
from tango_hpc.stages.scoring import ScoredSolution, score_solutions
from tango_hpc.stages.verifier_scores import JudgementCounts, outcome_counts, step_counts
from tango_hpc.successors.dynamic_sampling import groups_with_signal
from tango_hpc.successors.vote import majority_vote
from tango_hpc.tasks import Task
from tango_hpc.types import TrainSequence

Item = TypeVar("Item")
Metrics = dict[str, float | None]


@dataclass(frozen=True)
class GeneratorBatch:
    """The N solutions of a generator step, group after group, with V verifications each (none without a verifier).

    `trained` indexes those that the generator learns from; `num_missing` questions of the step's carry no signal.
    """

    step: int
    group_size: int
    algorithm: Algorithm
    alpha: float
    solutions_N: list[ReadSolution]
    verifications_N_V: list[list[ReadVerification]]
    scored: GeneratorAdvantages
    trained: list[int]
    num_missing: int

    @classmethod
    def score(
        cls,
        solutions_N: list[ReadSolution],
        verifications: Sequence[ReadVerification],
        *,
        step: int,
        config: Config,
        alpha: float,
    ) -> GeneratorBatch:
        """Eqs. 2–7 for these solutions and the verifications of each of them, solution after solution.

        They answer the questions of a step and, where `train.max_draws` allows, of those that were drawn in place of
        some; that goes on until none is missing. If no question carries a signal, those drawn first are trained on.
        """
        train, num_solutions = config.train, len(solutions_N)
        num_verifications = len(verifications) // num_solutions
        verifications_N_V = [
            list(verifications[i * num_verifications : (i + 1) * num_verifications]) for i in range(num_solutions)
        ]
        group_ids_N = _group_ids(step, train.rollouts_per_question, num_solutions)
        read_N = [
            ScoredSolution(
                group_id,
                read.solution,
                read.correct,
                read.step_end_tokens,
                read.response.num_tokens,
                *_first_and_others([judged.verification for judged in judged_V]),
            )
            for group_id, read, judged_V in zip(group_ids_N, solutions_N, verifications_N_V, strict=True)
        ]
        scored = score_solutions(read_N, config.algorithm, alpha)
        groups: set[Hashable] = set(group_ids_N)
        if train.max_draws > 1:
            groups = groups_with_signal(group_ids_N, scored.advantages_N_T)
        num_missing = train.questions_per_step - len(groups)
        groups = groups or set(group_ids_N[: train.questions_per_step * train.rollouts_per_question])
        trained = [i for i, group_id in enumerate(group_ids_N) if group_id in groups and scored.kept_N[i]]
        return cls(
            step,
            train.rollouts_per_question,
            config.algorithm.name,
            alpha,
            solutions_N,
            verifications_N_V,
            scored,
            trained,
            num_missing,
        )

    def sequences(self) -> list[TrainSequence]:
        """What the generator is trained on."""
        return _sequences(
            [self.solutions_N[i].response for i in self.trained],
            [self.scored.advantages_N_T[i] for i in self.trained],
        )

    def metrics(self, task: Task) -> Metrics:
        """What all solutions and their verifications are like, those included that are not trained on."""
        metrics = solution_metrics(self.solutions_N)
        metrics["alpha"] = self.alpha
        metrics["generator/outcome_reward"] = float(self.scored.outcome_rewards_N.mean())
        metrics["generator/trained_responses"] = len(self.trained)
        metrics["generator/trained_accuracy"] = statistics.fmean(self.solutions_N[i].correct for i in self.trained)
        num_drawn, trained = len(self.solutions_N) // self.group_size, {i // self.group_size for i in self.trained}
        metrics["data/questions_drawn"], metrics["data/questions_dropped"] = num_drawn, num_drawn - len(trained)
        verifications = [judged for judged_V in self.verifications_N_V for judged in judged_V]
        if verifications:
            rewards = [float(value) for rewards_K in self.scored.step_rewards_N_K for value in rewards_K]
            metrics["generator/step_reward"] = statistics.fmean(rewards) if rewards else None
            metrics |= verification_metrics(task, verifications)
            unscored = [
                not len(rewards_K)
                for rewards_K, read in zip(self.scored.step_rewards_N_K, self.solutions_N, strict=True)
                if read.solution.steps
            ]
            metrics["generator/without_step_rewards"] = statistics.fmean(unscored) if unscored else None
        if len(verifications) > len(self.solutions_N):
            voted = judging_metrics(task, [_voted(judged_V) for judged_V in self.verifications_N_V])
            for name in ("outcome_f1", "step_f1"):
                metrics[f"verifier/voted_{name}"] = voted[f"verifier/{name}"]
        metrics["tokens/generated"] = _generated(self.solutions_N, verifications)
        return metrics

    def graded(self) -> list[ReadSolution]:
        """The solutions that were graded."""
        return self.solutions_N

    def verdict_counts(self) -> JudgementCounts | None:
        """How the verdicts on the solutions fit the truth; None without a verifier."""
        verifications = [judged for judged_V in self.verifications_N_V for judged in judged_V]
        return _verdict_counts(verifications) if verifications else None

    def dump_rows(self) -> list[RolloutRow]:
        """One row for each solution."""
        group_ids_N = _group_ids(self.step, self.group_size, len(self.solutions_N))
        rows = []
        for i, (group_id, solution) in enumerate(zip(group_ids_N, self.solutions_N, strict=True)):
            judged_V = self.verifications_N_V[i]
            vote = _voted(judged_V).verification if judged_V else None
            first_text, other_texts = _first_and_others([judged.response.text for judged in judged_V])
            rows.append(
                RolloutRow(
                    step=self.step,
                    role="generator",
                    group_id=group_id,
                    response_id=f"{group_id}-{i % self.group_size}",
                    question=solution.question["question"],
                    gold_answer=solution.question["answer"],
                    **_of_response(solution.response),
                    step_end_tokens=solution.step_end_tokens,
                    solution_text=solution.response.text,
                    solution_correct=solution.correct,
                    verification_text=first_text,
                    other_verifications=other_texts,
                    step_judgements=vote.judgements if vote else [],
                    final_judgement=vote.final if vote else None,
                    outcome_reward=float(self.scored.outcome_rewards_N[i]),
                    step_rewards=self.scored.step_rewards_N_K[i].tolist(),
                    alpha=self.alpha,
                    algorithm=self.algorithm,
                    advantages=self.scored.advantages_N_T[i].tolist(),
                )
            )
        return rows


@dataclass(frozen=True)
class VerifierBatch:
    """The verifications of a verifier step, group after group; `asked` indexes the N of them that were asked for."""

    step: int
    group_size: int
    algorithm: Algorithm
    weights: ClassWeights
    verifications: list[ReadVerification]
    asked: list[int]
    scored: VerifierAdvantages

    @classmethod
    def score(
        cls,
        verifications: list[ReadVerification],
        averages: ClassWeightEma,
        *,
        step: int,
        group_size: int,
        algorithm: Algorithm,
        gamma: float,
    ) -> VerifierBatch:
        """Eqs. 8 and 9 for these verifications, every `group_size` of one solution; the averages take in the step.

        A solution that is too long for the verifier's context was not judged, and teaches nothing. Raises
        `CheckFailed` where that holds for all.
        """
        asked = [i for i, read in enumerate(verifications) if read.response.was_asked]
        if not asked:
            raise CheckFailed(
                f"none of the {len(verifications) // group_size} solutions of step {step} fits "
                "verifier.max_prompt_tokens; raise it, or lower generator.max_response_tokens"
            )
        group_ids = _group_ids(step, group_size, len(verifications))
        group_ids_N, read_N = [group_ids[i] for i in asked], [verifications[i] for i in asked]
        correct_N = [read.judged.correct for read in read_N]
        counts = num_right_and_wrong_solutions(group_ids_N, correct_N)
        weights = averages.weights(*counts)
        averages.update(*counts)
        scored = verifier_advantages_batch(
            group_ids_N=group_ids_N,
            solution_correct_N=correct_N,
            verdicts_N=[read.verification.final for read in read_N],
            format_rewards_N=[read.verification.format_reward for read in read_N],
            response_lengths_N=[read.response.num_tokens for read in read_N],
            weights=weights,
            gamma=gamma,
            algorithm=algorithm,
        )
        return cls(step, group_size, algorithm, weights, verifications, asked, scored)

    def sequences(self) -> list[TrainSequence]:
        """What the verifier is trained on."""
        return _sequences([self.verifications[i].response for i in self.asked], self.scored.advantages_N_T)

    def metrics(self, task: Task) -> Metrics:
        """What the verifications and the solutions that they judge are like."""
        solutions = self.graded()
        metrics = solution_metrics(solutions) | verification_metrics(task, self.verifications)
        metrics["verifier/reward"] = float(self.scored.rewards_N.mean())
        metrics["verifier/class_weight_right"], metrics["verifier/class_weight_wrong"] = self.weights
        metrics["tokens/generated"] = _generated(solutions, self.verifications)
        return metrics

    def graded(self) -> list[ReadSolution]:
        """The solutions that were graded, each once."""
        return [read.judged for read in self.verifications[:: self.group_size]]

    def verdict_counts(self) -> JudgementCounts:
        """How the verdicts on the solutions fit the truth."""
        return _verdict_counts(self.verifications)

    def dump_rows(self) -> list[RolloutRow]:
        """One row for each verification that was asked for."""
        group_ids = _group_ids(self.step, self.group_size, len(self.verifications))
        rows = []
        for place, i in enumerate(self.asked):
            read = self.verifications[i]
            rows.append(
                RolloutRow(
                    step=self.step,
                    role="verifier",
                    group_id=group_ids[i],
                    response_id=f"{group_ids[i]}-{i % self.group_size}",
                    question=read.judged.question["question"],
                    gold_answer=read.judged.question["answer"],
                    **_of_response(read.response),
                    solution_text=read.judged.response.text,
                    solution_correct=read.judged.correct,
                    step_judgements=read.verification.judgements,
                    final_judgement=read.verification.final,
                    format_reward=read.verification.format_reward,
                    reward=float(self.scored.rewards_N[place]),
                    class_weight=float(self.scored.class_weights_N[place]),
                    algorithm=self.algorithm,
                    advantages=self.scored.advantages_N_T[place].tolist(),
                )
            )
        return rows


def solution_metrics(solutions_N: Sequence[ReadSolution]) -> Metrics:
    """What the sampled solutions of a step are like."""
    mean = statistics.fmean
    return {
        "generator/accuracy": mean(read.correct for read in solutions_N),
        "generator/response_tokens": mean(read.response.num_tokens for read in solutions_N),
        "generator/num_steps": mean(len(read.solution.steps) for read in solutions_N),
        "generator/truncated_share": mean(read.response.generation.finish_reason == "length" for read in solutions_N),
        "generator/format_failures": mean(not read.solution.well_formed for read in solutions_N),
        "generator/not_graded": mean(read.verdict.outcome != "graded" for read in solutions_N),
    }


def judging_metrics(task: Task, read_N: Sequence[ReadVerification]) -> Metrics:
    """How verdicts and step judgements fit the truth."""
    labels_N_K = task.label_all([(read.judged.question, read.judged.solution.steps) for read in read_N])
    labelled = [
        (labels_K, read.verification.judgements)
        for labels_K, read in zip(labels_N_K, read_N, strict=True)
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


def _verdict_counts(read_N: Sequence[ReadVerification]) -> JudgementCounts:
    """How final verdicts fit the truth."""
    return outcome_counts([read.judged.correct for read in read_N], [read.verification.final for read in read_N])


def verification_metrics(task: Task, read_N: Sequence[ReadVerification]) -> Metrics:
    """What the sampled verifications of a step are like."""
    mean = statistics.fmean
    judgements = [judgement for read in read_N for judgement in read.verification.judgements]
    return judging_metrics(task, read_N) | {
        "verifier/missing_judgements": mean([judgement == 0 for judgement in judgements] or [0.0]),
        "verifier/format_reward": mean(read.verification.format_reward for read in read_N),
        "verifier/response_tokens": mean(read.response.num_tokens for read in read_N),
        "verifier/prompts_too_long": mean(not read.response.was_asked for read in read_N),
    }


def _group_ids(step: int, group_size: int, count: int) -> list[str]:
    return [f"{step}-{index // group_size}" for index in range(count)]


def _first_and_others(read_V: Sequence[Item]) -> tuple[Item | None, list[Item]]:
    return (read_V[0] if read_V else None), list(read_V[1:])


def _voted(judged_V: Sequence[ReadVerification]) -> ReadVerification:
    """The verifications of one solution as one; the one itself where it is alone."""
    return replace(judged_V[0], verification=majority_vote([judged.verification for judged in judged_V]))


def _sequences(responses_N: Sequence[Response], advantages_N_T: Sequence[FloatArray]) -> list[TrainSequence]:
    return [
        TrainSequence(response.prompt_ids, response.generation.token_ids, advantages_T, response.generation.logprobs)
        for response, advantages_T in zip(responses_N, advantages_N_T, strict=True)
    ]


def _generated(solutions: Sequence[ReadSolution], verifications: Sequence[ReadVerification]) -> int:
    responses = [*(read.response for read in solutions), *(read.response for read in verifications)]
    return sum(response.num_tokens for response in responses)


def _of_response(response: Response) -> dict[str, Any]:
    return {
        "prompt_ids": response.prompt_ids,
        "response_ids": response.generation.token_ids,
        "response_text": response.text,
        "response_logprobs": response.generation.logprobs,
    }
