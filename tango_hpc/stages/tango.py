"""Algorithm 1: generator and verifier trained in turn. Every rank runs this, in the same order.

What differs from the paper: a step's rollouts, verifications and the update itself can each be followed by a stop
(`safe_point`), from which the run goes on bit for bit; the log-probability gap between engine and trainer is measured
in every step and can end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tango_hpc.config import Config
from tango_hpc.data.sampler import QuestionSampler
from tango_hpc.data.tables import QUESTION_COLUMNS, read_rows
from tango_hpc.equations import ClassWeightEma
from tango_hpc.errors import StoppedEarly
from tango_hpc.protocol.prompts import generator_prompt_ids
from tango_hpc.run.checkpoint import Checkpoints
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.dumps import write_rollouts
from tango_hpc.run.interrupt import StopSignal
from tango_hpc.stages.evaluation import Evaluation
from tango_hpc.stages.journal import Clock, Journal
from tango_hpc.stages.role import Role, request_seeds
from tango_hpc.stages.schedule import role_schedule
from tango_hpc.stages.steps import StepResult, generator_step, verifier_step
from tango_hpc.tasks import get_task
from tango_hpc.types import Generation

STAGE = "train"


def run(config: Config, directory: RunDirectory, stop: StopSignal) -> None:
    """Train by Algorithm 1 until the schedule is done. Raises `StoppedEarly` when told to stop, having saved."""
    Tango(config, directory, stop).run()


class Tango:
    """The state of a run: both roles, and the counters that a checkpoint holds."""

    def __init__(self, config: Config, directory: RunDirectory, stop: StopSignal) -> None:
        self.config, self.directory, self.stop = config, directory, stop
        self.schedule = role_schedule(config)
        self.task = get_task(config.task.name)
        self.questions = read_rows(config.data.train, QUESTION_COLUMNS)
        num_steps = Counter(self.schedule)
        self.roles: dict[str, Role] = {}
        for name in config.roles:
            stop.enter(f"loading the {name}")
            self.roles[name] = Role(name, config, total_steps=num_steps[name])
        self.policies = {name: role.policy for name, role in self.roles.items() if role.policy is not None}
        self.generator = self.roles["generator"]
        self.verifier = self.roles.get("verifier")
        eval_questions = read_rows(config.data.eval, QUESTION_COLUMNS, limit=config.data.eval_questions)
        self.evaluation = Evaluation(self.task, eval_questions, self.generator, self.verifier)
        self.sampler = QuestionSampler(len(self.questions), config.seed, self._fits)
        self.class_weights = ClassWeightEma(config.algorithm.class_ema_decay)
        self.checkpoints = Checkpoints(directory, STAGE, config.checkpoint.keep)
        self.step = 0  # optimizer steps done, over both roles
        self.pending: dict[str, Any] = {}  # what the step under way has computed so far
        self.generated_tokens, self.step_seconds = 0, 0.0
        self.clock = Clock()

    # -- Algorithm 1 -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the last checkpoint, or from the start, to the end of the schedule."""
        self._restore()
        self.journal = Journal(self.directory, STAGE, self.stop, len(self.schedule), self.step)
        for name in self.policies:
            self.journal.phase("weights to the engine", role=name)
            self.roles[name].sync_weights()
        if self.step == 0 and not self.pending:
            self.evaluate("before")
        while self.step < len(self.schedule):
            role = self.schedule[self.step]
            result = generator_step(self) if role == "generator" else verifier_step(self)
            self._finish_step(role, result)
        self.save()
        self.journal.ended("done", self.tokens_per_second)

    def draw_questions(self) -> list[int]:
        """Indices of this step's questions; those of the interrupted step after a resume."""
        if "questions" not in self.pending:
            self.pending["questions"] = self.sampler.draw(self.config.train.questions_per_step)
        return self.pending["questions"]

    def generations(self, phase: str, generate: Callable[[], list[Generation]]) -> list[Generation]:
        """What `generate` gives in `phase`, or gave before the interruption; then a safe point."""
        if phase not in self.pending:
            self.journal.phase(phase, role=self.schedule[self.step])
            with self.clock(phase):
                generations = generate()
            self.pending[phase] = [(one.token_ids, one.logprobs, one.finish_reason) for one in generations]
            self.pending["seconds"] = dict(self.clock.seconds)
            self.safe_point(phase)
        return [Generation(*one) for one in self.pending[phase]]

    def sample(self, role: Role, prompts: list[list[int]], phase: str) -> list[Generation]:
        """Sampled responses of `role`; the seeds depend on run seed, step and phase alone."""
        return role.generate(prompts, request_seeds(self.config.seed, self.step, phase, len(prompts)))

    def safe_point(self, phase: str = "") -> None:
        """Save and leave if the run was told to stop. Nothing is lost and nothing is computed twice."""
        if not self.stop.check(phase or "between steps"):
            return
        self.save(phase)
        self.journal.ended("stopped", self.tokens_per_second)
        raise StoppedEarly(f"stopped after {self.step} of {len(self.schedule)} steps")

    def evaluate(self, suffix: str) -> None:
        """Greedy accuracy on held-out questions, and how well the verifier judges solutions of them."""
        self.journal.phase("evaluation")
        values = self.evaluation.run()
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

    def _finish_step(self, role: str, result: StepResult) -> None:
        self.step += 1
        seconds = self.clock.seconds
        row = {"step": self.step, "role": role, **result.metrics}
        row.update({f"seconds/{phase}": value for phase, value in seconds.items()})
        row["seconds/total"] = sum(seconds.values())
        self.generated_tokens += row["tokens/generated"]
        self.step_seconds += row["seconds/total"]
        self.pending, self.clock = {}, Clock()
        last = self.step == len(self.schedule)
        num_done = self.schedule[: self.step].count(role)
        dump_every = self.config.train.dump_every
        if dump_every and (num_done % dump_every == 0 or num_done == 1 or last) and self.stop.rank == 0:
            write_rollouts(self.directory.rollout_file(role, self.step), result.dump_rows(self.step))
        self.journal.step_done(row)
        eval_every, save_every = self.config.train.eval_every, self.config.checkpoint.every_steps
        warmed_up = self.step == self.config.train.verifier_warmup_steps
        leading = "generator" if "generator" in self.policies else "verifier"
        if last or (eval_every and (warmed_up or (role == leading and num_done % eval_every == 0))):
            self.evaluate("after")
        if not last:
            if save_every and self.step % save_every == 0:
                self.save()
            self.safe_point()

    def save(self, phase: str = "") -> None:
        """Write a checkpoint from which `_restore` goes on here."""
        self.journal.phase("saving")
        state = {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "class_weights": self.class_weights.state_dict(),
            "evaluation": self.evaluation.state_dict(),
            "pending": self.pending,
            "generated_tokens": self.generated_tokens,
            "step_seconds": self.step_seconds,
        }
        self.checkpoints.save(self.step, phase, self.policies, state)

    def _restore(self) -> None:
        path = self.checkpoints.latest()
        if path is None:
            return
        self.stop.enter("loading the checkpoint")
        state = self.checkpoints.load(path, self.policies)
        self.step, self.pending = state["step"], state["pending"]
        self.sampler.load_state_dict(state["sampler"])
        self.class_weights.load_state_dict(state["class_weights"])
        self.evaluation.load_state_dict(state["evaluation"])
        self.generated_tokens, self.step_seconds = state["generated_tokens"], state["step_seconds"]
        self.clock.seconds.update(self.pending.get("seconds", {}))

    def _fits(self, index: int) -> bool:
        """Whether a question's prompt fits the generator's context."""
        limit = self.generator.settings.max_prompt_tokens
        question = self.questions[index]["question"]
        return len(generator_prompt_ids(question, self.generator.tokenizer)) <= limit
