"""The batch of a step of either role: responses, advantages, metrics, dump rows.

Shape suffixes: `base.types`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tango_hpc.base.config import Config
from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.dumps import RolloutRow
from tango_hpc.base.types import TrainSequence
from tango_hpc.method.dynamic_sampling import groups_with_signal
from tango_hpc.method.equations import ClassWeightEma, ClassWeights, FloatArray
from tango_hpc.method.hooks import AdvantagesHook
from tango_hpc.method.step_labels import agreement
from tango_hpc.method.vote import majority_vote
from tango_hpc.questions.grading.pool import parts_as_json
from tango_hpc.questions.tasks import Task
from tango_hpc.stages.judgement_counts import JudgementCounts
from tango_hpc.stages.responses import ReadSolution, ReadVerification, Response
from tango_hpc.stages.scoring import (
    Moment,
    Scored,
    ScoredSolution,
    num_right_and_wrong_solutions,
    score_solutions,
    score_verifications,
    state_as_json,
)
from tango_hpc.stages.step_metrics import (
    Metrics,
    judging_metrics,
    signal_share,
    solution_metrics,
    verdict_counts,
    verification_metrics,
    were_asked,
)
from tango_hpc.stages.trying import NOTHING_TRIED, Tried

Item = TypeVar("Item")


@dataclass(frozen=True)
class GeneratorBatch:
    """The N solutions of a generator step, group after group, with V verifications each (none without a verifier).

    `trained` indexes those that the generator learns from; `num_missing` questions of the step's carry no signal.
    """

    step: int
    group_size: int
    algorithm: str
    moment: Moment
    solutions_N: list[ReadSolution]
    verifications_N_V: list[list[ReadVerification]]
    scored: Scored
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
        hook: AdvantagesHook,
        moment: Moment,
    ) -> GeneratorBatch:
        """Eqs. 2–7 for these solutions and the verifications of each of them, solution after solution.

        They answer the questions of a step and, where the file's `max_draws` allows, of those that were drawn in place
        of some; that goes on until none is missing. If no question carries a signal, those drawn first are trained on.
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
                read.verdict.reward,
                read.step_end_tokens,
                read.response.num_tokens,
                *_first_and_others([judged.verification for judged in judged_V]),
                truncated=read.response.generation.finish_reason == "length",
            )
            for group_id, read, judged_V in zip(group_ids_N, solutions_N, verifications_N_V, strict=True)
        ]
        scored = score_solutions(read_N, config.algorithm, hook, moment)
        groups = drawn = list(dict.fromkeys(group_ids_N))
        if hook.settings["max_draws"] > 1:
            signal = groups_with_signal(group_ids_N, scored.advantages_N_T)
            groups = [group_id for group_id in drawn if group_id in signal]
        num_missing = max(train.questions_per_step - len(groups), 0)
        # At most as many: what had no signal in the first draw may have one now that the verifier is listened to.
        groups = (groups or drawn)[: train.questions_per_step]
        scored = scored.silencing([not read.teaches for read in solutions_N])
        of_step = [i for i, group_id in enumerate(group_ids_N) if group_id in groups]
        trained = [i for i in of_step if scored.kept_N[i]] or of_step
        return cls(
            step,
            train.rollouts_per_question,
            hook.name,
            moment,
            solutions_N,
            verifications_N_V,
            scored,
            trained,
            num_missing,
        )

    def sequences(self) -> list[TrainSequence]:
        """Return the sequences that the generator is trained on."""
        return _sequences(
            [self.solutions_N[i].response for i in self.trained],
            [self.scored.advantages_N_T[i] for i in self.trained],
        )

    def metrics(self, task: Task) -> Metrics:
        """Return the metrics of all solutions and verifications, also of those that are not trained on."""
        metrics = solution_metrics(self.solutions_N)
        metrics["alpha"] = self.moment.alpha
        group_ids_N = _group_ids(self.step, self.group_size, len(self.solutions_N))
        metrics["groups_with_signal"] = signal_share(group_ids_N, self.scored.advantages_N_T)
        metrics["generator/outcome_reward"] = float(self.scored.rewards_N.mean())
        metrics["generator/trained_responses"] = len(self.trained)
        known = [self.solutions_N[i].correct for i in self.trained if self.solutions_N[i].has_truth]
        metrics["generator/trained_accuracy"] = statistics.fmean(known) if known else None
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
            asked_N_V = [judged_V for judged_V in self.verifications_N_V if were_asked(judged_V)]
            voted = judging_metrics(task, [_voted(judged_V) for judged_V in asked_N_V]) if asked_N_V else {}
            for name in ("outcome_f1", "step_f1"):
                metrics[f"verifier/voted_{name}"] = voted.get(f"verifier/{name}")
        return metrics

    def graded(self) -> list[ReadSolution]:
        """Return the solutions that were graded."""
        return self.solutions_N

    def verdict_counts(self) -> JudgementCounts | None:
        """Return how the verdicts on the solutions fit the truth; None without a verifier."""
        verifications = [judged for judged_V in self.verifications_N_V for judged in judged_V]
        return verdict_counts(verifications) if verifications else None

    def dump_rows(self) -> list[RolloutRow]:
        """Return one row for each solution."""
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
                    **_of_question(solution.question),
                    **_of_response(solution.response),
                    step_end_tokens=solution.step_end_tokens,
                    solution_text=solution.response.text,
                    solution_correct=solution.correct if solution.teaches else None,
                    score=solution.verdict.reward,
                    reward_parts=parts_as_json(solution.verdict),
                    verification_text=first_text,
                    other_verifications=other_texts,
                    step_judgements=vote.judgements if vote else [],
                    final_judgement=vote.final if vote else None,
                    outcome_reward=float(self.scored.rewards_N[i]),
                    step_rewards=self.scored.step_rewards_N_K[i].tolist(),
                    alpha=self.moment.alpha,
                    algorithm=self.algorithm,
                    state=state_as_json(self.moment),
                    advantages=self.scored.advantages_N_T[i].tolist(),
                )
            )
        return rows


@dataclass(frozen=True)
class VerifierBatch:
    """The verifications of a verifier step; `asked` indexes the N of them that were asked for.

    `drawn` are all solutions that were made for the step, of which those that a verification judges were chosen.
    """

    step: int
    algorithm: str
    moment: Moment
    weights: ClassWeights
    drawn: list[ReadSolution]
    verifications: list[ReadVerification]
    group_ids: list[str]
    asked: list[int]
    scored: Scored
    labels_N_K: list[list[int]]  # of the asked ones, by trying; empty where there are none
    num_tried_tokens: int

    @classmethod
    def score(
        cls,
        verifications: list[ReadVerification],
        groups: Sequence[int],
        averages: ClassWeightEma,
        *,
        drawn: list[ReadSolution],
        step: int,
        hook: AdvantagesHook,
        moment: Moment,
        settings: AlgorithmConfig,
        tried: Tried = NOTHING_TRIED,
    ) -> VerifierBatch:
        """Eqs. 8 and 9 for these verifications, those of one solution in one of `groups`; the averages take in the
        step.

        A solution that is too long for the verifier's context was not judged, and teaches nothing. Raises
        `CheckFailed` where that holds for all.
        """
        asked = [i for i, read in enumerate(verifications) if read.response.was_asked]
        if not asked:
            raise CheckFailed(
                f"none of the {len(set(groups))} solutions of step {step} fits verifier.max_prompt_tokens; raise it, or"
                " lower generator.max_response_tokens"
            )
        group_ids = [f"{step}-{group}" for group in groups]
        group_ids_N, read_N = [group_ids[i] for i in asked], [verifications[i] for i in asked]
        correct_N = [read.judged.correct for read in read_N]
        counts = num_right_and_wrong_solutions(group_ids_N, correct_N)
        weights = averages.weights(*counts)
        averages.update(*counts)
        labels_N_K = [tried.labels.get(groups[i], []) for i in asked]
        scored = score_verifications(
            group_ids_N,
            correct_N,
            [read.verification for read in read_N],
            [read.response.num_tokens for read in read_N],
            weights=weights,
            gamma=settings.format_weight,
            hook=hook,
            moment=moment,
            labels_N_K=labels_N_K,
            label_weight=settings.step_labels.weight if settings.step_labels is not None else 0.0,
        ).silencing([not read.judged.teaches for read in read_N])
        return cls(
            step,
            hook.name,
            moment,
            weights,
            drawn,
            verifications,
            group_ids,
            asked,
            scored,
            labels_N_K,
            tried.num_tokens,
        )

    @property
    def trained(self) -> Sequence[int]:
        """The places in `asked` of the verifications that are trained on: all where the file leaves out all."""
        return [place for place, is_kept in enumerate(self.scored.kept_N) if is_kept] or range(len(self.asked))

    def sequences(self) -> list[TrainSequence]:
        """Return the sequences that the verifier is trained on."""
        return _sequences(
            [self.verifications[self.asked[place]].response for place in self.trained],
            [self.scored.advantages_N_T[place] for place in self.trained],
        )

    def metrics(self, task: Task) -> Metrics:
        """Return the metrics of the drawn solutions and of the verifications."""
        metrics = solution_metrics(self.drawn) | verification_metrics(task, self.verifications)
        metrics["verifier/reward"] = float(self.scored.rewards_N.mean())
        metrics["verifier/class_weight_right"], metrics["verifier/class_weight_wrong"] = self.weights
        group_ids_N = [self.group_ids[i] for i in self.asked]
        metrics["groups_with_signal"] = signal_share(group_ids_N, self.scored.advantages_N_T)
        verdicts: dict[str, set[int]] = {}
        for i in self.asked:
            verdicts.setdefault(self.group_ids[i], set()).add(self.verifications[i].verification.final)
        metrics["verifier/agreeing_groups"] = statistics.fmean(len(given) == 1 for given in verdicts.values())
        judged = {self.group_ids[i]: self.verifications[i].judged.correct for i in self.asked}
        metrics["verifier/judged_right_share"] = statistics.fmean(judged.values())
        metrics["data/questions_drawn"] = len(self.drawn)
        metrics["verifier/trained_responses"] = len(self.trained)
        return metrics | self._label_metrics()

    def _label_metrics(self) -> Metrics:
        """Return how the judgements fit labels by trying; nothing without labels."""
        labelled = [
            (self.verifications[i], labels_K)
            for i, labels_K in zip(self.asked, self.labels_N_K, strict=True)
            if labels_K
        ]
        if not labelled:
            return {}
        one_of_each = {id(read.judged): labels_K for read, labels_K in labelled}
        steps = [label for labels_K in one_of_each.values() for label in labels_K]
        return {
            "verifier/step_agreement": statistics.fmean(
                agreement(read.verification.judgements, labels_K) for read, labels_K in labelled
            ),
            "verifier/steps_tried": len(steps),
            "verifier/steps_tried_right": statistics.fmean(label == 1 for label in steps),
            "tokens/tried": self.num_tried_tokens,
        }

    def graded(self) -> list[ReadSolution]:
        """Return the solutions that were graded, each once."""
        return self.drawn

    def verdict_counts(self) -> JudgementCounts:
        """Return how the verdicts on the solutions fit the truth."""
        return verdict_counts(self.verifications)

    def dump_rows(self) -> list[RolloutRow]:
        """Return one row for each verification that was asked for."""
        rows = []
        members: dict[str, int] = {}
        for place, i in enumerate(self.asked):
            read, group_id = self.verifications[i], self.group_ids[i]
            number = members[group_id] = members.get(group_id, -1) + 1
            rows.append(
                RolloutRow(
                    step=self.step,
                    role="verifier",
                    group_id=group_id,
                    response_id=f"{group_id}-{number}",
                    **_of_question(read.judged.question),
                    **_of_response(read.response),
                    solution_text=read.judged.response.text,
                    solution_correct=read.judged.correct if read.judged.teaches else None,
                    step_judgements=read.verification.judgements,
                    step_labels=self.labels_N_K[place],
                    final_judgement=read.verification.final,
                    format_reward=read.verification.format_reward,
                    reward=float(self.scored.rewards_N[place]),
                    class_weight=self.weights.right if read.judged.correct else self.weights.wrong,
                    algorithm=self.algorithm,
                    state=state_as_json(self.moment),
                    advantages=self.scored.advantages_N_T[place].tolist(),
                )
            )
        return rows


def _group_ids(step: int, group_size: int, count: int) -> list[str]:
    return [f"{step}-{index // group_size}" for index in range(count)]


def _first_and_others(read_V: Sequence[Item]) -> tuple[Item | None, list[Item]]:
    return (read_V[0] if read_V else None), list(read_V[1:])


def _voted(judged_V: Sequence[ReadVerification]) -> ReadVerification:
    """Return the verifications of one solution as one; the one itself where it is alone."""
    return replace(judged_V[0], verification=majority_vote([judged.verification for judged in judged_V]))


def _sequences(responses_N: Sequence[Response], advantages_N_T: Sequence[FloatArray]) -> list[TrainSequence]:
    return [
        TrainSequence(response.prompt_ids, response.generation.token_ids, advantages_T, response.generation.logprobs)
        for response, advantages_T in zip(responses_N, advantages_N_T, strict=True)
    ]


def _of_question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "question_id": row["id"],
        "question": row["question"],
        "gold_answer": row["answer"],
        "source": row["source"],
        "metadata": row.get("metadata"),
    }


def _of_response(response: Response) -> dict[str, Any]:
    return {
        "prompt_ids": response.prompt_ids,
        "response_ids": response.generation.token_ids,
        "response_text": response.text,
        "response_logprobs": response.generation.logprobs,
    }
