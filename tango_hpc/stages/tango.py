"""Algorithm 1: generator and verifier trained in turn. Every process of either role runs this, in the same order.

What differs from the paper: a step's rollouts, verifications and the update itself can each be followed by a stop
(`_safe_point`), from which the run goes on, on CPUs bit for bit; the log-probability gap between engine and trainer is
measured in every step and can end the run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.errors import CheckFailed, StoppedEarly
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import write_rollouts
from tango_hpc.base.run.metrics import MetricsRow
from tango_hpc.base.run.step_names import numbered
from tango_hpc.base.types import Generation
from tango_hpc.method.equations import ClassWeightEma, alpha_schedule
from tango_hpc.method.role_schedule import num_trained, role_schedule
from tango_hpc.method.steady_verifier import balanced, gated_alpha, is_balanced
from tango_hpc.method.vote import majority_vote
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.trainer.checkpoints import Checkpoints
from tango_hpc.models.trainer.loss import Batch
from tango_hpc.models.weight_sync.sync import SyncStats
from tango_hpc.questions.data.tables import evenly_spaced, read_questions
from tango_hpc.questions.tasks import get_task
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages.expectation import AFTER_STEPS, compare_with_plan
from tango_hpc.stages.held_out import HeldOut
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.memo import StepMemo
from tango_hpc.stages.method_files import changed_files
from tango_hpc.stages.pseudo_labels import grade_by_majority
from tango_hpc.stages.questions import TrainingQuestions, not_asked
from tango_hpc.stages.responses import FailureWatch, Grading, ReadSolution, ReadVerification, settled
from tango_hpc.stages.role import Generator, Model, Role, Verifier, load_models, request_seeds
from tango_hpc.stages.scoring import Moment
from tango_hpc.stages.sharing import in_each
from tango_hpc.stages.step_metrics import verdict_counts
from tango_hpc.stages.steps import GeneratorBatch, VerifierBatch
from tango_hpc.stages.throughput import Tracer, own_turns, usage_metrics
from tango_hpc.stages.trouble import Action, Trouble, TroubleWatch, read_rollbacks, what_to_do, write_rollbacks
from tango_hpc.stages.trying import NOTHING_TRIED, Tried, labelled, starts_of
from tango_hpc.stages.update import update_metrics

STAGE = "train"
Batches = dict[str, GeneratorBatch | VerifierBatch]  # of a step, by role


def train(config: Config, directory: RunDirectory, process: RankProcess, exchange: Exchange) -> None:
    """Train by Algorithm 1 until the schedule is done. Raises `StoppedEarly` when told to stop, having saved."""
    Tango(config, directory, process, exchange).train()


@dataclass
class Done:
    """The work that the run has done."""

    steps: int = 0  # optimizer steps, over both roles
    rollbacks: int = 0
    generated_tokens: int = 0  # of responses, in optimizer steps
    seconds: float = 0.0  # of optimizer steps

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens generated per second of optimizer steps, over the whole stage."""
        return self.generated_tokens / self.seconds if self.seconds else None


class Tango:
    """The state of a run: models, roles, and the counters that a checkpoint holds."""

    def __init__(self, config: Config, directory: RunDirectory, process: RankProcess, exchange: Exchange) -> None:
        self.config, self.directory, self.process, self.exchange = config, directory, process, exchange
        self.schedule = role_schedule(config)
        self.task = get_task(config.task)
        steps = Counter(config.model_of(role) for role in self.schedule)
        num_updates = {name: count * config.train.updates_per_batch for name, count in steps.items()}
        models = load_models(config.models, config, exchange, process, num_updates)
        self.generator = Generator("generator", config, exchange, models["generator"])
        self.verifier: Verifier | None = None
        if config.verifier is not None:
            self.verifier = Verifier("verifier", config, exchange, models[config.model_of("verifier")])
        eval_questions = evenly_spaced(read_questions(config.data.eval), config.data.eval_questions)
        self.held_out = HeldOut(self.task, eval_questions, self.generator, self.verifier, self._ready_to_evaluate)
        self.questions = TrainingQuestions(config, self.task, self.generator, exchange)
        self.class_weights = ClassWeightEma(config.algorithm.class_ema_decay, config.algorithm.class_weights)
        self.watch, self.failures = TroubleWatch(config.train.max_logprob_gap), FailureWatch(self.task)
        self.checkpoints = Checkpoints(directory, STAGE, config.checkpoint, exchange)
        self.tracer = Tracer(directory, f"{exchange.role}-{exchange.number}", config.train.trace_steps)
        self.done = Done(rollbacks=exchange.all_gather(read_rollbacks(directory))[0])
        self.memo = StepMemo()

    @property
    def roles(self) -> dict[str, Role]:
        """The roles by name."""
        return {role.name: role for role in (self.generator, self.verifier) if role is not None}

    @property
    def models(self) -> dict[str, Model]:
        """The models by name."""
        return {role.model.name: role.model for role in self.roles.values()}

    @property
    def trained(self) -> dict[str, Role]:
        """The roles that learn, by name."""
        return {name: role for name, role in self.roles.items() if role.settings.trainable}

    @property
    def trained_models(self) -> dict[str, Model]:
        """The models that learn, by name."""
        return {role.model.name: role.model for role in self.trained.values()}

    # -- Algorithm 1 -----------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the end of the schedule."""
        self.process.has_loaded()
        self._restore()
        self._open_journal()
        if self.done.steps == 0 and not self.memo.results:
            self.evaluate("before")
            if "rollback" in self.config.train.on_trouble.model_dump().values():
                self.save()  # a rollback needs a checkpoint
        while self.done.steps < len(self.schedule):
            role = self.roles[self.schedule[self.done.steps]]
            self.tracer.before(self.done.steps + 1)
            with self.memo.clock("score"):
                batches = self.batches(role)
                metrics = self._metrics(batches)
            metrics |= self._update(role, batches)
            self.tracer.after(self.done.steps + 1)
            self._finish_step(role.name, batches, metrics)
        self.save()
        self.journal.ended("done", self.done.tokens_per_second)

    def batches(self, role: Role) -> Batches:
        """Return what a step of `role` trains on, by role: with joint updates that of the generator on both kinds."""
        if isinstance(role, Verifier):
            return {"verifier": self.verifier_batch(role)}
        solved = self.generator_batch()
        if not self.config.train.joint:
            return {"generator": solved}
        assert self.verifier is not None, "joint updates are of both roles"
        return {"generator": solved, "verifier": self._judged_again(self.verifier, solved)}

    def generator_batch(self) -> GeneratorBatch:
        """Draw M solutions of each question, verify each once or several times, and compute Eq. 7.

        Where questions may be drawn again, those without a signal are replaced until there are enough with one.
        """
        train, num_questions = self.config.train, self.config.train.questions_per_step
        solutions_N: list[ReadSolution] = []
        verifications: list[ReadVerification] = []
        hook, moment = self.generator.advantages, self._moment(self.generator)
        judged: list[ReadVerification] = []
        for draw in range(1, hook.settings["max_draws"] + 1):
            drawn = self._draw_questions(num_questions, draw)
            questions = [question for question in drawn for _ in range(train.rollouts_per_question)]
            solutions, grading = self._solve(questions, draw)
            solutions_N += solutions
            if self.verifier is not None:
                repeated = [solution for solution in solutions for _ in range(train.verifications_per_solution)]
                judged = self._judge(self.verifier, repeated, draw)
                verifications += judged
            grading.settle()
            self._grade_by_majority(solutions, judged)
            batch = GeneratorBatch.score(
                solutions_N,
                verifications,
                step=self.done.steps + 1,
                config=self.config,
                hook=hook,
                moment=replace(moment, alpha=self._alpha(verifications)),
            )
            num_questions = batch.num_missing
            if not num_questions:
                break
        self.generator.method_state = batch.scored.state
        return batch

    def verifier_batch(self, verifier: Verifier) -> VerifierBatch:
        """Return one solution of each question, M verifications of it, and their advantages by Eq. 9.

        Where several draws are allowed, right and wrong solutions are judged in as equal numbers as they give.
        """
        train = self.config.train
        drawn: list[ReadSolution] = []
        for draw in range(1, train.verifier_draws + 1):
            solutions, grading = self._solve_once(verifier, draw)
            drawn += solutions
            if train.verifier_draws > 1:  # which of them are judged depends on their grades
                grading.settle()
                if is_balanced([read.correct for read in drawn], train.questions_per_step):
                    break
        judged_Q = drawn
        if train.verifier_draws > 1:
            judged_Q = [drawn[i] for i in balanced([read.correct for read in drawn], train.questions_per_step)]
        groups = [q for q in range(len(judged_Q)) for _ in range(train.rollouts_per_question)]
        number = train.verifier_draws + int(train.verified_majority)  # after the draws that were judged for their votes
        tried = self._try(judged_Q, grading, number)
        verifications = self._judge(verifier, [judged_Q[q] for q in groups], after=number)
        grading.settle()
        return self._scored(verifier, verifications, groups, drawn, tried)

    def _try(self, judged_Q: Sequence[ReadSolution], grading: Grading | None, number: int) -> Tried:
        """Return labels of the steps of the first of these solutions: the generator goes on from the end of each step.

        `number` places the name of a checkpoint that is written here among those of the step.
        """
        settings, most = self.config.algorithm.step_labels, self.generator.settings.max_response_tokens
        if settings is None:
            return NOTHING_TRIED
        if grading is not None:
            grading.settle()  # a whole response is its own continuation
        starts = starts_of(judged_Q, settings)
        asked = [start for start in starts if not start.is_whole for _ in range(settings.continuations)]
        texts = [[*start.read.response.prompt_ids, *start.prefix] for start in asked]
        written: list[Generation] = []
        if texts:
            written = self.once("try", 1, self.generator, texts, after=number, write=self.generator.go_on)
        responses = [start.continued(one, most) for start, one in zip(asked, written, strict=True)]
        solutions = settled(
            self.generator.read(
                self.task,
                [start.read.question for start in asked],
                [start.read.response.prompt_ids for start in asked],
                responses,
            )
        )
        found = iter(solutions)
        shares = [
            float(start.read.correct)
            if start.is_whole
            else statistics.fmean(next(found).correct for _ in range(settings.continuations))
            for start in starts
        ]
        return Tried(labelled(starts, shares, settings), sum(len(one.token_ids) for one in written))

    def _judged_again(self, verifier: Verifier, solved: GeneratorBatch) -> VerifierBatch:
        """Return M verifications of each of some of a generator step's solutions, those of the step among them, and
        their advantages by Eq. 9.

        The solutions are the first of each question, then the second of each, until there are
        `train.joint_solutions`.
        """
        train, hook = self.config.train, self.generator.advantages
        order = sorted(range(len(solved.solutions_N)), key=lambda i: i % train.rollouts_per_question)
        chosen = order[: train.num_joint_solutions]
        num_more = max(train.rollouts_per_question - train.verifications_per_solution, 0)
        repeated = [solved.solutions_N[i] for i in chosen for _ in range(num_more)]
        tried = self._try([solved.solutions_N[i] for i in chosen], None, hook.settings["max_draws"] + 1)
        more = iter(self._judge(verifier, repeated, hook.settings["max_draws"] + 1) if repeated else [])
        verifications, groups = [], []
        for group, i in enumerate(chosen):
            of_one = [*solved.verifications_N_V[i], *islice(more, num_more)]
            verifications += of_one
            groups += [group] * len(of_one)
        return self._scored(verifier, verifications, groups, [solved.solutions_N[i] for i in chosen], tried)

    def _scored(
        self,
        verifier: Verifier,
        verifications: list[ReadVerification],
        groups: Sequence[int],
        drawn: list[ReadSolution],
        tried: Tried,
    ) -> VerifierBatch:
        """Return the verifications with their advantages; `groups` says which judge the same solution."""
        batch = VerifierBatch.score(
            verifications,
            groups,
            self.class_weights,
            drawn=drawn,
            step=self.done.steps + 1,
            hook=verifier.advantages,
            moment=self._moment(verifier),
            settings=self.config.algorithm,
            tried=tried,
        )
        verifier.method_state = batch.scored.state
        return batch

    def evaluate(self, suffix: str) -> None:
        """Measure greedy accuracy on held-out questions, and how well the verifier judges solutions of them."""
        self.journal.phase("evaluation")
        values = self.held_out.evaluate()
        self.failures.observe(
            self.held_out.answered_Q, f"in the evaluation after step {self.done.steps}", self.journal.note
        )
        self.journal.evaluated(self.done.steps, values)
        names = {"accuracy": "generator/accuracy", "outcome_f1": "verifier/outcome_f1", "step_f1": "verifier/step_f1"}
        results = {
            f"{key.split('/')[0]}.{name}_{suffix}": values[key]
            for name, key in names.items()
            if values.get(key) is not None
        }
        self.journal.results(results)
        for model in self.models.values():
            model.take_spent()  # of the evaluation, which is in no step

    # -- the parts of a step -----------------------------------------------------------------------------------

    def _draw_questions(self, count: int, draw: int) -> list[dict[str, Any]]:
        """Return the questions of this step's `draw`-th draw."""
        return self.questions.at(self.memo.once(numbered("questions", draw), lambda: self.questions.draw(count)))

    def _solve(self, questions_N: Sequence[dict[str, Any]], draw: int) -> tuple[list[ReadSolution], Grading]:
        """Return a solution of each question, and their grading, which has begun."""
        prompts_N = self.generator.prompts(self.task, questions_N)
        texts = self.once("rollout", draw, self.generator, prompts_N)
        return self.generator.read(self.task, questions_N, prompts_N, texts)

    def _solve_once(self, verifier: Verifier, draw: int) -> tuple[list[ReadSolution], Grading]:
        """Return a solution of each of a draw's questions, and their grading, which has begun.

        Of a question without an answer M solutions are drawn, which grade the first one. If none of the questions has
        an answer or a majority, all solutions are returned, and none of them teaches.
        """
        train, questions = self.config.train, self._draw_questions(self.config.train.questions_per_step, draw)
        if all(question["answer"] is not None for question in questions):
            return self._solve(questions, draw)
        copies = [1 if question["answer"] is not None else train.rollouts_per_question for question in questions]
        asked = [question for question, count in zip(questions, copies, strict=True) for _ in range(count)]
        solutions, grading = self._solve(asked, draw)
        unknown = [read for read in solutions if not read.has_truth]
        judged = self._judge(verifier, unknown, draw) if train.verified_majority else []
        grading.settle()
        self._grade_by_majority(unknown, judged)
        first = [solutions[end - count] for end, count in zip(accumulate(copies), copies, strict=True)]
        return [read for read in first if read.teaches] or first, grading

    def _grade_by_majority(
        self, solutions_N: Sequence[ReadSolution], verifications: Sequence[ReadVerification]
    ) -> None:
        """Grade solutions of questions without an answer, M of each question in a row; the verifier filters the votes
        if `train.verified_majority` says so.
        """
        train, num_votes = self.config.train, len(verifications) // max(len(solutions_N), 1)
        if train.majority_share is None:
            return
        counts = [True] * len(solutions_N)
        if train.verified_majority:
            votes = [verifications[i : i + num_votes] for i in range(0, len(verifications), num_votes)]
            counts = [majority_vote([one.verification for one in of_one]).final == 1 for of_one in votes]
        size = train.rollouts_per_question
        places = range(0, len(solutions_N), size)
        groups = [solutions_N[i : i + size] for i in places]
        grade_by_majority(
            groups, [counts[i : i + size] for i in places], train.majority_share, self.task, self.exchange
        )

    def _judge(
        self, verifier: Verifier, solutions_N: Sequence[ReadSolution], draw: int = 1, *, after: int = 1
    ) -> list[ReadVerification]:
        """Return a verification of each solution of the `draw`-th draw; `after` draws of questions at most come
        before.
        """
        prompts_N = verifier.prompts(solutions_N)
        texts = self.once("verify", draw, verifier, prompts_N, after=after)
        return verifier.read(solutions_N, prompts_N, texts)

    def once(
        self,
        phase: str,
        draw: int,
        role: Role,
        prompts_N: Sequence[list[int]],
        *,
        after: int = 1,
        write: Callable[[Sequence[list[int]], Sequence[int]], list[Generation]] | None = None,
    ) -> list[Generation]:
        """Return what `role` writes in `phase`, or wrote before an interruption; after the writing comes a safe point.

        `write`: the role's `write` if it is None.
        The sampling seeds depend on run seed, step, phase, draw and the number of rollbacks alone. `after` puts the
        name of a checkpoint that is written here behind those of as many draws of questions.
        """
        name = numbered(phase, after - 1 + draw)
        responses = self.memo.responses(name)
        if responses is None:
            seed, done = self.config.seed, self.done
            seeds_N = request_seeds(seed, done.steps, numbered(phase, draw), len(prompts_N), done.rollbacks)
            self._sync(role)
            self.journal.phase(phase, role=self.schedule[done.steps])
            with self.memo.clock(phase):
                responses = (write or role.write)(prompts_N, seeds_N)
            self.memo.keep(name, responses)
            self._safe_point(name)
        return responses

    def _sync(self, role: Role) -> None:
        """Bring the trainer's weights into the engine if they are not there."""
        if role.model.stale:
            self.journal.phase("reshard", role=role.model.name)
            with self.memo.clock("reshard"):
                self.memo.synced += role.model.sync_weights()

    def _ready_to_evaluate(self, role: Role) -> None:
        self._sync(role)
        self.journal.phase("evaluation")

    def _metrics(self, batches: Batches) -> dict[str, Any]:
        """Return the metrics of the step's responses: computed once, in the first process."""

        def measured() -> dict[str, Any]:
            metrics: dict[str, Any] = {}
            for batch in reversed(batches.values()):  # the generator's has all solutions: it decides
                metrics |= batch.metrics(self.task)
            return metrics | {"tokens/generated": self.memo.num_tokens}

        return in_each(self.exchange, lambda: measured() if self.exchange.is_first else {})[0]

    def _moment(self, role: Role) -> Moment:
        """Return the moment of the run in which the advantages of `role` are computed."""
        return Moment(
            step=self._num_done(role.name),
            total_steps=num_trained(self.schedule, role.name, self.config),
            max_response_tokens=role.settings.max_response_tokens,
            state=role.method_state,
        )

    def _alpha(self, verifications: Sequence[ReadVerification]) -> float:
        """Return the weight of step advantages: as scheduled, or 0 while the verdicts up to these are of no use."""
        algorithm = self.config.algorithm
        alpha = alpha_schedule(
            self.schedule[: self.done.steps].count("generator"),
            self.schedule.count("generator"),
            algorithm.alpha_start if self.verifier is not None else 0.0,
            algorithm.alpha_end,
            algorithm.alpha_schedule,
        )
        j = self.watch.recent.pooled(verdict_counts(verifications)).j
        return gated_alpha(alpha, j, algorithm.min_verifier_j)

    def _update(self, role: Role, batches: Batches) -> dict[str, Any]:
        """Train the model of `role` on the step's batches and return the metrics of its updates."""
        weights = {"generator": 1.0, "verifier": self.config.train.joint_weight if len(batches) > 1 else 1.0}
        parts = [Batch(batch.sequences(), self.roles[name].loss, weights[name]) for name, batch in batches.items()]
        self.journal.phase("train", role=role.name)
        with self.memo.clock("logprobs"):
            role.model.prepare(parts)
        with self.memo.clock("train"):
            updates = role.model.update(parts, self.config.train.updates_per_batch)
        return update_metrics(updates, self.memo.synced, role.loss)

    # -- what follows a step -----------------------------------------------------------------------------------

    def _finish_step(self, role: str, batches: Batches, metrics: dict[str, Any]) -> None:
        """Count the step, write it down, act on trouble, evaluate, save, stop: each as the settings ask."""
        batch = batches[role]
        row = self._count_step(role, metrics)
        with self.memo.clock("score"):  # of the next row: this one is written in it
            self._dump(role, batches)
            found, troubles = self.watch.observe(row, batch.verdict_counts())
            self.journal.step_done(row | found)
            action, text = self._act_on(troubles)
        if action == "rollback":
            self._go_back(text)
            return
        self.failures.observe(batch.graded(), f"at step {self.done.steps}", self.journal.note)
        if self.done.steps == AFTER_STEPS and self.exchange.is_first:
            for line in compare_with_plan(self.config, self.directory):
                self.journal.note(line)
        if self._is_evaluated_after(role):
            self.evaluate("after")
        if action == "stop":
            self.save()
        if action != "warn":
            raise CheckFailed(text)
        if self.done.steps < len(self.schedule):
            save_every = self.config.checkpoint.every_steps
            if save_every and self.done.steps % save_every == 0:
                self.save(background=bool(self.config.checkpoint.background))
            self._safe_point()

    def _count_step(self, role: str, metrics: dict[str, Any]) -> MetricsRow:
        """Count the step as done, begin the memo of the next, and return the step's row of metrics."""
        self.done.steps += 1
        spent = {name: model.take_spent() for name, model in self.models.items()}
        seconds = own_turns(self.memo.clock.so_far(), spent)
        row = {"step": self.done.steps, "role": role, **metrics}
        row |= {"data/rows": self.questions.num_rows, "data/too_long": self.questions.num_too_long}
        row |= {f"seconds/{phase}": value for phase, value in seconds.items()}
        row["seconds/total"] = sum(seconds.values())
        row |= usage_metrics(row, row.pop("operations"), self.config.world_size, spent)
        self.done.generated_tokens += row["tokens/generated"]
        self.done.seconds += row["seconds/total"]
        self.memo = StepMemo()
        return row

    def _dump(self, role: str, batches: Batches) -> None:
        """Write the step's responses to a file, in the first step of a role, its last, and every `train.dump_every`."""
        every, num_done = self.config.train.dump_every, self._num_done(role)
        if every and (num_done % every == 0 or num_done in (1, self.schedule.count(role))) and self.exchange.is_first:
            for name, batch in batches.items():
                write_rollouts(self.directory.rollout_file(name, self.done.steps), batch.dump_rows())

    def _is_evaluated_after(self, role: str) -> bool:
        """Return whether an evaluation follows the step that `role` has just done."""
        every, steps = self.config.train.eval_every, self.done.steps
        leading = "generator" if "generator" in self.trained else "verifier"
        is_due = role == leading and every and self._num_done(role) % every == 0
        ends_warm_up = every and steps == self.config.train.verifier_warmup_steps
        return bool(steps == len(self.schedule) or ends_warm_up or is_due)

    def _num_done(self, role: str) -> int:
        return num_trained(self.schedule[: self.done.steps], role, self.config)

    def _act_on(self, troubles: list[Trouble]) -> tuple[Action, str]:
        """Say which troubles began; return what `train.on_trouble` asks for, and why."""
        self.journal.troubled([trouble.text for trouble in troubles], self.watch.active.values())
        train = self.config.train
        return what_to_do(troubles, train.on_trouble, self.done.rollbacks, train.max_rollbacks)

    def _go_back(self, text: str) -> None:
        """Return to the last checkpoint and sample anew from there."""
        self.done.rollbacks, left, known = self.done.rollbacks + 1, self.done.steps, len(self.checkpoints.set_aside)
        if self.exchange.is_first:
            write_rollbacks(self.directory, self.done.rollbacks)
        self._restore()
        steps = self.done.steps
        told = f"back from step {left} to step {steps}, on with other sampling seeds ({self.done.rollbacks})"
        self.journal.went_back(steps, f"{text}: {told}")
        self.journal.checkpoints_set_aside(self.checkpoints.set_aside[known:])

    def _safe_point(self, phase: str = "") -> None:
        """Save and leave if a stop was requested. Nothing is lost and nothing is computed twice."""
        self.checkpoints.complete(wait=False)
        if not self.process.check(phase or "between steps"):
            return
        self.save(phase)
        self.journal.ended("stopped", self.done.tokens_per_second)
        raise StoppedEarly(f"stopped after {self.done.steps} of {len(self.schedule)} steps")

    def _open_journal(self) -> None:
        """Open the journal of this attempt, and say which checkpoints and questions it leaves out."""
        total, first, trackers = len(self.schedule), self.exchange.is_first, self.config.run.trackers
        self.journal = Journal(
            self.directory, STAGE, self.process, total, self.done.steps, writes=first, trackers=trackers
        )
        self.journal.checkpoints_set_aside(self.checkpoints.set_aside)
        limit = self.generator.settings.max_prompt_tokens
        left_out = not_asked(self.questions.num_too_long, self.questions.num_rows, self.held_out, limit)
        for text in (*left_out, *self.questions.notes, *changed_files(self.config)):
            self.journal.note(text)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self, phase: str = "", *, background: bool = False) -> None:
        """Write a checkpoint from which `_restore` goes on here."""
        self.journal.phase("saving")
        state = {
            "step": self.done.steps,
            "sampler": self.questions.state_dict(),
            "class_weights": self.class_weights.state_dict(),
            "method": {name: role.method_state for name, role in self.trained.items()},
            "watch": self.watch.state_dict(),
            "rollbacks": self.done.rollbacks,
            "evaluation": self.held_out.state_dict(),
            "pending": self.memo.results,
            "synced": asdict(self.memo.synced),
            "owing": sorted(name for name, model in self.trained_models.items() if model.sync_counts),
            "generated_tokens": self.done.generated_tokens,
            "step_seconds": self.done.seconds,
        }
        self.checkpoints.save(self.done.steps, phase, self.trained_models, state, background=background)

    def _restore(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        self.process.heart.enter("verifying the checkpoint")
        path = self.checkpoints.latest()
        if path is None:
            return
        self.process.heart.enter("loading the checkpoint")
        state = self.checkpoints.load(path, self.trained_models)
        self.questions.load_state_dict(state["sampler"])
        self.class_weights.load_state_dict(state["class_weights"])
        self.watch.load_state_dict(state["watch"])
        pending = state["pending"]
        if self.done.rollbacks > state["rollbacks"]:
            # What was sampled for a step that this was saved in is what led to going back; its first questions stay.
            pending = {name: drawn for name, drawn in pending.items() if name == "questions"}
        self.held_out.load_state_dict(state["evaluation"])
        for name, model in self.trained_models.items():
            model.sync_counts = name in state["owing"]
        for name, role in self.trained.items():
            role.method_state = state["method"][name]
        rollbacks = max(self.done.rollbacks, state["rollbacks"])
        self.done = Done(state["step"], rollbacks, state["generated_tokens"], state["step_seconds"])
        self.memo = StepMemo(pending, SyncStats(**state["synced"]))
