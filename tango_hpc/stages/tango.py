"""Algorithm 1: generator and verifier trained in turn. Every process of either role runs this, in the same order.

What differs from the paper: a step's rollouts, verifications and the update itself can each be followed by a stop
(`_safe_point`), from which the run goes on, on CPUs bit for bit; the log-probability gap between engine and trainer is
measured in every step and can end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from tango_hpc.config import Config
from tango_hpc.control.stop import StopSignal
from tango_hpc.data.sampler import QuestionSampler
from tango_hpc.data.tables import QUESTION_COLUMNS, read_rows
from tango_hpc.equations import ClassWeightEma, alpha_schedule
from tango_hpc.errors import CheckFailed, StoppedEarly
from tango_hpc.parallel.exchange import Exchange
from tango_hpc.policy.checkpoints import Checkpoints
from tango_hpc.policy.loss import LossSettings
from tango_hpc.reshard.sync import SyncStats
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.dumps import write_rollouts
from tango_hpc.run.steps import numbered
from tango_hpc.stages.evaluation import HeldOut
from tango_hpc.stages.journal import Clock, Journal
from tango_hpc.stages.responses import FailureWatch, ReadSolution, ReadVerification
from tango_hpc.stages.role import Generator, Role, Verifier, request_seeds
from tango_hpc.stages.schedule import role_schedule
from tango_hpc.stages.sharing import in_shares
from tango_hpc.stages.steps import GeneratorBatch, VerifierBatch
from tango_hpc.stages.update import GapWatch, update_metrics
from tango_hpc.stages.verifier_scores import JudgementCounts, UsefulnessWatch
from tango_hpc.tasks import get_task
from tango_hpc.types import Generation

STAGE = "train"
PHASES = {"rollout": "generator", "verify": "verifier"}  # in which who generates


def train(config: Config, directory: RunDirectory, stop: StopSignal, exchange: Exchange) -> None:
    """Train by Algorithm 1 until the schedule is done. Raises `StoppedEarly` when told to stop, having saved."""
    Tango(config, directory, stop, exchange).train()


class Tango:
    """The state of a run: both roles, and the counters that a checkpoint holds."""

    def __init__(self, config: Config, directory: RunDirectory, stop: StopSignal, exchange: Exchange) -> None:
        self.config, self.directory, self.stop, self.exchange = config, directory, stop, exchange
        self.schedule = role_schedule(config)
        self.task = get_task(config.task)
        num_updates = {name: steps * config.train.updates_per_batch for name, steps in Counter(self.schedule).items()}
        stop.enter("loading the generator")
        self.generator = Generator("generator", config, exchange, num_updates.get("generator", 0))
        self.verifier: Verifier | None = None
        if config.verifier is not None:
            stop.enter("loading the verifier")
            self.verifier = Verifier("verifier", config, exchange, num_updates.get("verifier", 0))
        self.roles: dict[str, Role] = {role.name: role for role in (self.generator, self.verifier) if role is not None}
        self.trained = {name: role for name, role in self.roles.items() if role.settings.trainable}
        eval_questions = read_rows(config.data.eval, QUESTION_COLUMNS, limit=config.data.eval_questions)
        self.held_out = HeldOut(self.task, eval_questions, self.generator, self.verifier, self._in_evaluation)
        self.questions, self.num_too_long = self._that_fit(read_rows(config.data.train, QUESTION_COLUMNS))
        self.sampler = QuestionSampler(len(self.questions), config.seed)
        self.class_weights = ClassWeightEma(config.algorithm.class_ema_decay, config.algorithm.class_weights)
        self.usefulness = UsefulnessWatch()
        self.gaps = GapWatch(config.train.max_logprob_gap)
        self.failures = FailureWatch()
        self.checkpoints = Checkpoints(directory, STAGE, config.checkpoint.keep, exchange)
        self.step = 0  # optimizer steps done, over both roles
        self.pending: dict[str, Any] = {}  # what the step under way has computed so far
        # The weight syncs since the last row of metrics, and who owes one to the next row.
        self.synced, self.owing = SyncStats(), set(self.trained)
        self.generated_tokens, self.step_seconds = 0, 0.0
        self.clock = Clock()

    # -- Algorithm 1 -----------------------------------------------------------------------------------------

    def train(self) -> None:
        """From the last checkpoint, or from the start, to the end of the schedule."""
        self._restore()
        writes = self.exchange.is_first
        self.journal = Journal(self.directory, STAGE, self.stop, len(self.schedule), self.step, writes=writes)
        self.journal.checkpoints_set_aside(self.checkpoints.set_aside)
        self._tell_what_is_not_asked()
        if self.step == 0 and not self.pending:
            self.evaluate("before")
        while self.step < len(self.schedule):
            role = self.roles[self.schedule[self.step]]
            num_updates, loss = self.config.train.updates_per_batch, self._loss(role)
            batch = self.verifier_batch(role) if isinstance(role, Verifier) else self.generator_batch()
            metrics, sequences_N = batch.metrics(self.task), batch.sequences()
            self.journal.phase("train", role=role.name)
            with self.clock("logprobs"):
                role.prepare(sequences_N, loss, num_updates)
            with self.clock("train"):
                updates = role.update(sequences_N, loss, num_updates)
            self.owing.add(role.name)
            self._finish_step(role.name, batch, metrics | update_metrics(updates, self.synced))
        self.save()
        self.journal.ended("done", self.tokens_per_second)

    def generator_batch(self) -> GeneratorBatch:
        """M solutions of each question, a verification of each or several, advantages by Eq. 7.

        Where questions may be drawn again, those without a signal are replaced until there are enough with one.
        """
        train, num_questions = self.config.train, self.config.train.questions_per_step
        solutions_N: list[ReadSolution] = []
        verifications: list[ReadVerification] = []
        with self.clock("score"):
            for draw in range(1, train.max_draws + 1):
                drawn = self._draw_questions(num_questions, draw)
                questions = [question for question in drawn for _ in range(train.rollouts_per_question)]
                solutions = self.generator.ask(self.task, questions, **self._phase("rollout", len(questions), draw))
                solutions_N += solutions
                if self.verifier is not None:
                    repeated = [solution for solution in solutions for _ in range(train.verifications_per_solution)]
                    verifications += self.verifier.judge(repeated, **self._phase("verify", len(repeated), draw))
                batch = GeneratorBatch.score(
                    solutions_N, verifications, step=self.step + 1, config=self.config, alpha=self._alpha()
                )
                num_questions = batch.num_missing
                if not num_questions:
                    break
        return batch

    def verifier_batch(self, verifier: Verifier) -> VerifierBatch:
        """One solution of each question, M verifications of it, advantages by Eq. 9."""
        algorithm, group_size = self.config.algorithm, self.config.train.rollouts_per_question
        with self.clock("score"):
            questions = self._draw_questions(self.config.train.questions_per_step)
            solutions = self.generator.ask(self.task, questions, **self._phase("rollout", len(questions)))
            repeated = [solution for solution in solutions for _ in range(group_size)]
            return VerifierBatch.score(
                verifier.judge(repeated, **self._phase("verify", len(repeated))),
                self.class_weights,
                step=self.step + 1,
                group_size=group_size,
                algorithm=algorithm.name,
                gamma=algorithm.format_weight,
            )

    def _alpha(self) -> float:
        algorithm = self.config.algorithm
        return alpha_schedule(
            self.schedule[: self.step].count("generator"),
            self.schedule.count("generator"),
            algorithm.alpha_start if self.verifier is not None else 0.0,
            algorithm.alpha_end,
            algorithm.alpha_schedule,
        )

    def _loss(self, role: Role) -> LossSettings:
        algorithm = self.config.algorithm
        return LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
            loss_average=algorithm.loss_average,
            importance_cap=algorithm.importance_cap,
            max_logprob_gap=self.config.train.max_logprob_gap,
            temperature=role.settings.temperature,
        )

    def evaluate(self, suffix: str) -> None:
        """Greedy accuracy on held-out questions, and how well the verifier judges solutions of them."""
        self.journal.phase("evaluation")
        values = self.held_out.evaluate()
        self.journal.evaluated(self.step, values)
        names = {"accuracy": "generator/accuracy", "outcome_f1": "verifier/outcome_f1", "step_f1": "verifier/step_f1"}
        results = {
            f"{key.split('/')[0]}.{name}_{suffix}": values[key]
            for name, key in names.items()
            if values.get(key) is not None
        }
        self.journal.results(results)

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens generated per second of optimizer steps, over the whole stage."""
        return self.generated_tokens / self.step_seconds if self.step_seconds else None

    # -- what surrounds it -------------------------------------------------------------------------------------

    def _draw_questions(self, count: int, draw: int = 1) -> list[dict[str, Any]]:
        """The questions of this step's `draw`-th draw; those of the interrupted step after a resume."""
        name = numbered("questions", draw)
        if name not in self.pending:
            self.pending[name] = self.sampler.draw(count)
        return [self.questions[index] for index in self.pending[name]]

    def _phase(self, phase: str, count: int, draw: int = 1) -> dict[str, Any]:
        """How a role is asked in `phase`: the seeds depend on run seed, step, phase and draw alone, and what was
        generated before an interruption is not generated again.
        """
        seeds = request_seeds(self.config.seed, self.step, numbered(phase, draw), count)
        return {"seeds_N": seeds, "through": partial(self._generated_in, phase, draw)}

    def _generated_in(self, phase: str, draw: int, generate: Callable[[], list[Generation]]) -> list[Generation]:
        """What `generate` gives in `phase`, or gave before the interruption; then a safe point."""
        name = numbered(phase, draw)
        if name not in self.pending:
            asked = self.roles[PHASES[phase]]
            self._sync(asked)
            self.journal.phase(phase, role=self.schedule[self.step])
            with self.clock(phase):
                generations = generate()
            self._note_what_is_owed(asked)
            self.pending[name] = [(made.token_ids, made.logprobs, made.finish_reason) for made in generations]
            self.pending["seconds"] = self.clock.so_far()
            self._safe_point(name)
        return [Generation(*saved) for saved in self.pending[name]]

    def _in_evaluation(self, role: Role) -> Callable[[Callable[[], list[Generation]]], list[Generation]]:
        """How a role is asked in an evaluation, which no interruption cuts in two."""

        def generated(generate: Callable[[], list[Generation]]) -> list[Generation]:
            self._sync(role)
            self.journal.phase("evaluation")
            generations = generate()
            self._note_what_is_owed(role)
            return generations

        return generated

    def _sync(self, role: Role) -> None:
        """Bring the trainer's weights into the engine if they are not there.

        What an uninterrupted run would do as well counts in the metrics; a restart's own syncs do not.
        """
        if not role.stale:
            return
        self.journal.phase("reshard", role=role.name)
        with self.clock("reshard"):
            stats = role.sync_weights()
        if role.name in self.owing:
            self.owing.remove(role.name)
            self.synced += stats

    def _note_what_is_owed(self, role: Role) -> None:
        """On a GPU an engine has slept after it has generated, and forgotten its weights."""
        if role.stale:
            self.owing.add(role.name)

    def _safe_point(self, phase: str = "") -> None:
        """Save and leave if the run was told to stop. Nothing is lost and nothing is computed twice."""
        if not self.stop.check(phase or "between steps"):
            return
        self.save(phase)
        self.journal.ended("stopped", self.tokens_per_second)
        raise StoppedEarly(f"stopped after {self.step} of {len(self.schedule)} steps")

    def _finish_step(self, role: str, batch: GeneratorBatch | VerifierBatch, metrics: dict[str, Any]) -> None:
        self.step += 1
        seconds = self.clock.so_far()
        row = {"step": self.step, "role": role, **metrics}
        row |= {"data/rows": len(self.questions) + self.num_too_long, "data/too_long": self.num_too_long}
        row |= {f"seconds/{phase}": value for phase, value in seconds.items()}
        row["seconds/total"] = sum(seconds.values())
        self.generated_tokens += row["tokens/generated"]
        self.step_seconds += row["seconds/total"]
        self.pending, self.clock, self.synced = {}, Clock(), SyncStats()
        last = self.step == len(self.schedule)
        num_done = self.schedule[: self.step].count(role)
        dump_every = self.config.train.dump_every
        if dump_every and (num_done % dump_every == 0 or num_done == 1 or last) and self.exchange.is_first:
            write_rollouts(self.directory.rollout_file(role, self.step), batch.dump_rows())
        self.journal.step_done(row)
        self._watch_usefulness(batch.verdict_counts())
        self._watch_gap(role, row["logprob_gap/mean_abs"])
        if failure := self.failures.observe(self.task, batch.graded()):
            self.journal.note(f"at step {self.step} grading failed, and what it failed at counts as wrong: {failure}")
        eval_every, save_every = self.config.train.eval_every, self.config.checkpoint.every_steps
        warmed_up = self.step == self.config.train.verifier_warmup_steps
        leading = "generator" if "generator" in self.trained else "verifier"
        if last or (eval_every and (warmed_up or (role == leading and num_done % eval_every == 0))):
            self.evaluate("after")
        if not last:
            if save_every and self.step % save_every == 0:
                self.save()
            self._safe_point()

    def _watch_usefulness(self, verdicts: JudgementCounts | None) -> None:
        """Note it when the verifier's verdicts come to help no longer."""
        j = self.usefulness.observe(verdicts) if verdicts is not None else None
        if j is not None:
            self.journal.note(
                f"at step {self.step} the verifier's verdicts do not tell right solutions from wrong ones: "
                f"true-positive less false-positive rate (verifier/outcome_j) is {j:.3f} over the last "
                f"{self.usefulness.WINDOW} steps; at 0 or below, learning from it stands still or turns around"
            )

    def _watch_gap(self, role: str, mean_gap: float) -> None:
        """Note it when engine and trainer come to differ by half of what ends the run."""
        if self.gaps.observe(role, mean_gap):
            self.journal.note(
                f"at step {self.step} engine and trainer of the {role} differ by {mean_gap:.3g} in the mean log-probability "
                f"of a sampled token (logprob_gap/mean_abs); above {self.gaps.limit:g} (train.max_logprob_gap) the run ends"
            )

    def save(self, phase: str = "") -> None:
        """Write a checkpoint from which `_restore` goes on here."""
        self.journal.phase("saving")
        state = {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "class_weights": self.class_weights.state_dict(),
            "usefulness": self.usefulness.state_dict(),
            "gaps": self.gaps.state_dict(),
            "evaluation": self.held_out.state_dict(),
            "pending": self.pending,
            "synced": asdict(self.synced),
            "owing": sorted(self.owing),
            "generated_tokens": self.generated_tokens,
            "step_seconds": self.step_seconds,
        }
        self.checkpoints.save(self.step, phase, self.trained, state)

    def _restore(self) -> None:
        self.stop.enter("verifying the checkpoint")
        path = self.checkpoints.latest()
        if path is None:
            return
        self.stop.enter("loading the checkpoint")
        state = self.checkpoints.load(path, self.trained)
        self.step, self.pending = state["step"], state["pending"]
        self.sampler.load_state_dict(state["sampler"])
        self.class_weights.load_state_dict(state["class_weights"])
        self.usefulness.load_state_dict(state["usefulness"])
        self.gaps.load_state_dict(state["gaps"])
        self.held_out.load_state_dict(state["evaluation"])
        self.synced, self.owing = SyncStats(**state["synced"]), set(state["owing"])
        self.generated_tokens, self.step_seconds = state["generated_tokens"], state["step_seconds"]
        self.clock = Clock(self.pending.get("seconds", {}))

    def _that_fit(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
        """The questions whose prompt fits the generator's context, and how many do not. Collective."""
        generator, statement = self.generator, self.task.statement
        fits = in_shares(
            self.exchange, lambda some: [generator.fits(generator.prompt(statement(row))) for row in some], rows
        )
        kept = [row for row, fitting in zip(rows, fits, strict=True) if fitting]
        if not kept:
            raise CheckFailed(
                f"none of the {len(rows)} questions in {self.config.data.train} fits generator.max_prompt_tokens, "
                f"{generator.settings.max_prompt_tokens}"
            )
        return kept, len(rows) - len(kept)

    def _tell_what_is_not_asked(self) -> None:
        limit = self.generator.settings.max_prompt_tokens
        for what, num_too_long, total in (
            ("training", self.num_too_long, len(self.questions) + self.num_too_long),
            ("evaluation", self.held_out.num_too_long, self.held_out.num_questions),
        ):
            if num_too_long:
                self.journal.note(
                    f"{num_too_long:,} of {total:,} {what} questions are not asked: their prompt is longer than "
                    f"generator.max_prompt_tokens = {limit}"
                )
