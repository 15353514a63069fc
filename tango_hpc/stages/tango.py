"""Algorithm 1: generator and verifier trained in turn. Every process of either role runs this, in the same order.

What differs from the paper: a step's rollouts, verifications and the update itself can each be followed by a stop
(`_safe_point`), from which the run goes on, on CPUs bit for bit; the log-probability gap between engine and trainer is
measured in every step and can end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.errors import CheckFailed, StoppedEarly
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import write_rollouts
from tango_hpc.base.run.step_names import numbered
from tango_hpc.base.types import Generation
from tango_hpc.method.equations import ClassWeightEma, alpha_schedule
from tango_hpc.method.steady_verifier import agreed_and_wrong, balanced, gated_alpha, is_balanced
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.trainer.checkpoints import Checkpoints
from tango_hpc.models.weight_sync.sync import SyncStats
from tango_hpc.questions.data.sampler import QuestionSampler
from tango_hpc.questions.data.tables import evenly_spaced, read_questions
from tango_hpc.questions.tasks import get_task
from tango_hpc.runner.stop import StopSignal
from tango_hpc.stages.held_out import HeldOut
from tango_hpc.stages.journal import Clock, Journal
from tango_hpc.stages.questions import not_asked, questions_that_fit
from tango_hpc.stages.responses import FailureWatch, ReadSolution, ReadVerification
from tango_hpc.stages.role import Generator, Role, Verifier, request_seeds
from tango_hpc.stages.role_schedule import WarmUp
from tango_hpc.stages.sharing import in_each
from tango_hpc.stages.step_metrics import verdict_counts
from tango_hpc.stages.steps import GeneratorBatch, VerifierBatch
from tango_hpc.stages.throughput import Tracer, own_turns, usage_metrics
from tango_hpc.stages.trouble import Action, Trouble, TroubleWatch, read_rollbacks, what_to_do, write_rollbacks
from tango_hpc.stages.update import loss_settings, update_metrics

STAGE = "train"
PHASES = {"rollout": "generator", "verify": "verifier"}  # in which who generates


def train(config: Config, directory: RunDirectory, stop: StopSignal, exchange: Exchange) -> None:
    """Train by Algorithm 1 until the schedule is done. Raises `StoppedEarly` when told to stop, having saved."""
    Tango(config, directory, stop, exchange).train()


class Tango:
    """The state of a run: both roles, and the counters that a checkpoint holds."""

    def __init__(self, config: Config, directory: RunDirectory, stop: StopSignal, exchange: Exchange) -> None:
        self.config, self.directory, self.stop, self.exchange = config, directory, stop, exchange
        self.warm_up = WarmUp(config)
        self.schedule = self.warm_up.schedule
        self.task = get_task(config.task)
        num_updates = {name: steps * config.train.updates_per_batch for name, steps in Counter(self.schedule).items()}
        stop.enter("loading the generator")
        self.generator = Generator("generator", config, exchange, stop, num_updates.get("generator", 0))
        self.verifier: Verifier | None = None
        if config.verifier is not None:
            stop.enter("loading the verifier")
            self.verifier = Verifier("verifier", config, exchange, stop, num_updates.get("verifier", 0))
        self.roles: dict[str, Role] = {role.name: role for role in (self.generator, self.verifier) if role is not None}
        self.trained = {name: role for name, role in self.roles.items() if role.settings.trainable}
        eval_questions = evenly_spaced(read_questions(config.data.eval), config.data.eval_questions)
        self.held_out = HeldOut(self.task, eval_questions, self.generator, self.verifier, self._in_evaluation)
        self.questions, self.num_too_long = questions_that_fit(config.data.train, self.task, self.generator, exchange)
        self.sampler = QuestionSampler(len(self.questions), config.seed)
        self.class_weights = ClassWeightEma(config.algorithm.class_ema_decay, config.algorithm.class_weights)
        self.watch = TroubleWatch(config.train.max_logprob_gap)
        self.failures = FailureWatch(self.task)
        self.checkpoints = Checkpoints(directory, STAGE, config.checkpoint, exchange)
        self.step = 0  # optimizer steps done, over both roles
        self.rollbacks = exchange.all_gather(read_rollbacks(directory))[0]
        self.pending: dict[str, Any] = {}  # what the step under way has computed so far
        # The weight syncs since the last row of metrics, and who owes one to the next row.
        self.synced, self.owing = SyncStats(), set(self.trained)
        self.generated_tokens, self.step_seconds = 0, 0.0
        self.tracer = Tracer(directory, f"{exchange.role}-{exchange.number}", config.train.trace_steps)
        self.clock = Clock()

    # -- Algorithm 1 -----------------------------------------------------------------------------------------

    def train(self) -> None:
        """From the last checkpoint, or from the start, to the end of the schedule."""
        self.stop.has_loaded()
        self._restore()
        total, first = len(self.schedule), self.exchange.is_first
        trackers = self.config.run.trackers
        self.journal = Journal(self.directory, STAGE, self.stop, total, self.step, writes=first, trackers=trackers)
        self.journal.checkpoints_set_aside(self.checkpoints.set_aside)
        num_rows, limit = len(self.questions) + self.num_too_long, self.generator.settings.max_prompt_tokens
        for text in not_asked(self.num_too_long, num_rows, self.held_out, limit):
            self.journal.note(text)
        if self.step == 0 and not self.pending:
            self.evaluate("before")
            if "rollback" in self.config.train.on_trouble.model_dump().values():
                self.save()  # there must be something to go back to
        while self.step < len(self.schedule):
            self.warm_up.wait(self.step)
            self.schedule = self.warm_up.schedule
            role = self.roles[self.schedule[self.step]]
            self.tracer.before(self.step + 1)
            num_updates, loss = self.config.train.updates_per_batch, loss_settings(self.config, role.settings)
            with self.clock("score"):
                batch = self.verifier_batch(role) if isinstance(role, Verifier) else self.generator_batch()
                metrics, sequences_N = self._metrics(batch), batch.sequences()
            self.journal.phase("train", role=role.name)
            with self.clock("logprobs"):
                role.prepare(sequences_N, loss)
            with self.clock("train"):
                updates = role.update(sequences_N, loss, num_updates)
            self.owing.add(role.name)
            self.tracer.after(self.step + 1)
            self._finish_step(role.name, batch, metrics | update_metrics(updates, self.synced, loss))
        self.save()
        self.journal.ended("done", self.tokens_per_second)

    def generator_batch(self) -> GeneratorBatch:
        """M solutions of each question, a verification of each or several, advantages by Eq. 7.

        Where questions may be drawn again, those without a signal are replaced until there are enough with one.
        """
        train, num_questions = self.config.train, self.config.train.questions_per_step
        solutions_N: list[ReadSolution] = []
        verifications: list[ReadVerification] = []
        for draw in range(1, train.max_draws + 1):
            drawn = self._draw_questions(num_questions, draw)
            questions = [question for question in drawn for _ in range(train.rollouts_per_question)]
            phase = self._phase("rollout", len(questions), draw)
            solutions, grading = self.generator.solve(self.task, questions, **phase)
            solutions_N += solutions
            if self.verifier is not None:
                repeated = [solution for solution in solutions for _ in range(train.verifications_per_solution)]
                verifications += self.verifier.judge(repeated, **self._phase("verify", len(repeated), draw))
            grading.settle()
            batch = GeneratorBatch.score(
                solutions_N, verifications, step=self.step + 1, config=self.config, alpha=self._alpha(verifications)
            )
            num_questions = batch.num_missing
            if not num_questions:
                break
        return batch

    def verifier_batch(self, verifier: Verifier) -> VerifierBatch:
        """One solution of each question, M verifications of it, advantages by Eq. 9.

        Where several draws are allowed, right and wrong solutions are judged in as equal numbers as they give; and where
        all verdicts on a solution agree and are wrong, it is judged again.
        """
        train, algorithm = self.config.train, self.config.algorithm
        drawn: list[ReadSolution] = []
        for draw in range(1, train.verifier_draws + 1):
            questions = self._draw_questions(train.questions_per_step, draw)
            phase = self._phase("rollout", len(questions), draw)
            solutions, grading = self.generator.solve(self.task, questions, **phase)
            drawn += solutions
            if train.verifier_draws > 1:  # which of them are judged depends on their grades
                grading.settle()
                if is_balanced([read.correct for read in drawn], train.questions_per_step):
                    break
        judged_K = drawn
        if train.verifier_draws > 1:
            judged_K = [drawn[i] for i in balanced([read.correct for read in drawn], train.questions_per_step)]
        verifications: list[ReadVerification] = []
        groups: list[int] = []
        again = list(range(len(judged_K)))
        for draw in range(1, train.verification_draws + 1):
            asked = [k for k in again for _ in range(train.rollouts_per_question)]
            phase = self._phase("verify", len(asked), draw, after=train.verifier_draws)
            verifications += verifier.judge([judged_K[k] for k in asked], **phase)
            groups += asked
            grading.settle()
            verdicts_K_M: list[list[int]] = [[] for _ in judged_K]
            for k, read in zip(groups, verifications, strict=True):
                verdicts_K_M[k].append(read.verification.final)
            again = agreed_and_wrong([read.correct for read in judged_K], verdicts_K_M)
            if not again:
                break
        return VerifierBatch.score(
            verifications,
            groups,
            self.class_weights,
            drawn=drawn,
            num_first=len(judged_K) * train.rollouts_per_question,
            step=self.step + 1,
            algorithm=algorithm.name,
            gamma=algorithm.format_weight,
        )

    def _metrics(self, batch: GeneratorBatch | VerifierBatch) -> dict[str, Any]:
        """What the step is like: computed once, in the first process."""
        return in_each(self.exchange, lambda: batch.metrics(self.task) if self.exchange.is_first else {})[0]

    def _alpha(self, verifications: Sequence[ReadVerification]) -> float:
        """The weight of step advantages: as scheduled, or 0 while the verdicts up to these are of no use."""
        algorithm = self.config.algorithm
        alpha = alpha_schedule(
            self.schedule[: self.step].count("generator"),
            self.schedule.count("generator"),
            algorithm.alpha_start if self.verifier is not None else 0.0,
            algorithm.alpha_end,
            algorithm.alpha_schedule,
        )
        j = self.watch.recent.pooled(verdict_counts(verifications)).j
        return gated_alpha(alpha, j, algorithm.min_verifier_j)

    def evaluate(self, suffix: str) -> None:
        """Greedy accuracy on held-out questions, and how well the verifier judges solutions of them."""
        self.journal.phase("evaluation")
        values = self.held_out.evaluate()
        self.failures.observe(self.held_out.answered_K, f"in the evaluation after step {self.step}", self.journal.note)
        self.journal.evaluated(self.step, values)
        names = {"accuracy": "generator/accuracy", "outcome_f1": "verifier/outcome_f1", "step_f1": "verifier/step_f1"}
        results = {
            f"{key.split('/')[0]}.{name}_{suffix}": values[key]
            for name, key in names.items()
            if values.get(key) is not None
        }
        self.journal.results(results)
        for role in self.roles.values():
            role.take_spent()  # of the evaluation, which is in no step

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

    def _phase(self, phase: str, count: int, draw: int = 1, after: int = 1) -> dict[str, Any]:
        """How a role is asked in `phase`: the seeds depend on run seed, step, phase, draw and how often the run went back
        alone, and what was generated before an interruption is not again. `after`: the most draws of questions before.
        """
        seeds = request_seeds(self.config.seed, self.step, numbered(phase, draw), count, self.rollbacks)
        return {"seeds_N": seeds, "through": partial(self._generated_in, phase, after - 1 + draw)}

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
        self.checkpoints.complete(wait=False)
        if not self.stop.check(phase or "between steps"):
            return
        self.save(phase)
        self.journal.ended("stopped", self.tokens_per_second)
        raise StoppedEarly(f"stopped after {self.step} of {len(self.schedule)} steps")

    def _finish_step(self, role: str, batch: GeneratorBatch | VerifierBatch, metrics: dict[str, Any]) -> None:
        self.step += 1
        spent = {name: asked.take_spent() for name, asked in self.roles.items()}
        seconds = own_turns(self.clock.so_far(), spent)
        row = {"step": self.step, "role": role, **metrics}
        row |= {"data/rows": len(self.questions) + self.num_too_long, "data/too_long": self.num_too_long}
        row |= {f"seconds/{phase}": value for phase, value in seconds.items()}
        row["seconds/total"] = sum(seconds.values())
        row |= usage_metrics(row, row.pop("operations"), self.config.world_size, spent)
        self.generated_tokens += row["tokens/generated"]
        self.step_seconds += row["seconds/total"]
        self.pending, self.clock, self.synced = {}, Clock(), SyncStats()
        last = self.step == len(self.schedule)
        num_done = self.schedule[: self.step].count(role)
        dump_every, of_role = self.config.train.dump_every, self.schedule.count(role)
        self.warm_up.observe([read.correct for read in batch.graded()])
        with self.clock("score"):  # of the next row: this one is written in it
            if dump_every and (num_done % dump_every == 0 or num_done in (1, of_role)) and self.exchange.is_first:
                write_rollouts(self.directory.rollout_file(role, self.step), batch.dump_rows())
            found, troubles = self.watch.observe(row, batch.verdict_counts())
            self.journal.step_done(row | found)
            action, text = self._told_of(troubles)
        if action == "rollback":
            self._go_back(text)
            return
        self.failures.observe(batch.graded(), f"at step {self.step}", self.journal.note)
        eval_every, save_every = self.config.train.eval_every, self.config.checkpoint.every_steps
        warmed_up = self.step == self.warm_up.steps.stop
        leading = "generator" if "generator" in self.trained else "verifier"
        if last or (eval_every and (warmed_up or (role == leading and num_done % eval_every == 0))):
            self.evaluate("after")
        if action == "stop":
            self.save()
        if action != "warn":
            raise CheckFailed(text)
        if not last:
            if save_every and self.step % save_every == 0:
                self.save(background=bool(self.config.checkpoint.background))
            self._safe_point()

    def _told_of(self, troubles: list[Trouble]) -> tuple[Action, str]:
        """Tell of the troubles that began; what `train.on_trouble` asks for, and why."""
        self.journal.troubled([trouble.text for trouble in troubles], self.watch.active.values())
        train = self.config.train
        return what_to_do(troubles, train.on_trouble, self.rollbacks, train.max_rollbacks)

    def _go_back(self, text: str) -> None:
        """Be at the last checkpoint again, and sample anew from there."""
        self.rollbacks, left, known = self.rollbacks + 1, self.step, len(self.checkpoints.set_aside)
        if self.exchange.is_first:
            write_rollbacks(self.directory, self.rollbacks)
        self._restore()
        told = f"back from step {left} to step {self.step}, on with other sampling seeds ({self.rollbacks})"
        self.journal.went_back(self.step, f"{text}: {told}")
        self.journal.checkpoints_set_aside(self.checkpoints.set_aside[known:])

    def save(self, phase: str = "", *, background: bool = False) -> None:
        """Write a checkpoint from which `_restore` goes on here."""
        self.journal.phase("saving")
        state = {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "class_weights": self.class_weights.state_dict(),
            "watch": self.watch.state_dict(),
            "warm_up": self.warm_up.state_dict(),
            "rollbacks": self.rollbacks,
            "evaluation": self.held_out.state_dict(),
            "pending": self.pending,
            "synced": asdict(self.synced),
            "owing": sorted(self.owing),
            "generated_tokens": self.generated_tokens,
            "step_seconds": self.step_seconds,
        }
        self.checkpoints.save(self.step, phase, self.trained, state, background=background)

    def _restore(self) -> None:
        self.stop.enter("verifying the checkpoint")
        path = self.checkpoints.latest()
        if path is None:
            return
        self.stop.enter("loading the checkpoint")
        state = self.checkpoints.load(path, self.trained)
        self.step, self.pending = state["step"], state["pending"]
        self.warm_up.load_state_dict(state["warm_up"])
        self.sampler.load_state_dict(state["sampler"])
        self.class_weights.load_state_dict(state["class_weights"])
        self.watch.load_state_dict(state["watch"])
        if self.rollbacks > state["rollbacks"]:
            # What was sampled for a step that this was saved in is what led to going back; its first questions stay.
            self.pending = {name: drawn for name, drawn in self.pending.items() if name == "questions"}
        self.rollbacks = max(self.rollbacks, state["rollbacks"])
        self.schedule = self.warm_up.schedule
        self.held_out.load_state_dict(state["evaluation"])
        self.synced, self.owing = SyncStats(**state["synced"]), set(state["owing"])
        self.generated_tokens, self.step_seconds = state["generated_tokens"], state["step_seconds"]
        self.clock = Clock(self.pending.get("seconds", {}))
