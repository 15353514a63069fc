"""The models and the roles that they take, generator and verifier, as every process of a run sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tango_hpc.base.config import Config
from tango_hpc.base.config.role_prompts import role_prompt
from tango_hpc.base.prompts import TEMPLATES, Template, stop_token_ids, verifier_values
from tango_hpc.base.run.manifest import FileSum
from tango_hpc.base.types import Generation, GenerationRequest, SamplingSettings
from tango_hpc.models.engine import engine
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.trainer.loss import Batch, LossSettings, UpdateStats
from tango_hpc.models.weight_sync.sync import SyncStats
from tango_hpc.questions.protocol.tokenizer import load_tokenizer
from tango_hpc.questions.tasks import Task
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages.method_files import load_advantages
from tango_hpc.stages.model_folder import check_known
from tango_hpc.stages.model_worker import ModelWorker
from tango_hpc.stages.responses import (
    NOT_ASKED,
    Grading,
    ReadSolution,
    ReadVerification,
    Written,
    read_solutions,
    read_verifications,
)
from tango_hpc.stages.sharing import OnceForAll, in_shares
from tango_hpc.stages.throughput import Spent
from tango_hpc.stages.update import loss_settings


class Model:
    """A model that is asked, and trained where one of its roles is; the same object in every process.

    What it does is done in its own processes (`ModelWorker`) and handed to the others: every method is collective over
    all processes. `stale`: its engine lacks the trainer's present weights, and gets them before it generates; so it is
    at first, after an update, and on a GPU whenever it has slept. `sync_counts`: the next weight sync is one that an
    uninterrupted run makes too.
    """

    def __init__(
        self, name: str, config: Config, exchange: Exchange, process: RankProcess, total_steps: int = 0
    ) -> None:
        self.name, self.exchange, self._process = name, exchange, process
        trainable = config.models[name].trainable
        self._worker: ModelWorker | None = None
        self.stale = self.sync_counts = trainable
        others_wake = len(config.models) > 1
        self._forgets = trainable and config.launch.device in engine.FORGETFUL_DEVICES and others_wake

        def load() -> None:
            self._worker = ModelWorker(name, config, total_steps)

        if config.launch.device == "cuda":  # which the models share: one after the other
            exchange.run(name, load)
        elif exchange.role == name:
            load()

    @property
    def _here(self) -> ModelWorker:
        assert self._worker is not None, f"this is no process of the {self.name}"
        return self._worker

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        """Complete every request. Brings the trainer's weights into the engine first if they are not there."""
        if self.stale:
            self.sync_weights()
        generations = self.exchange.run(self.name, lambda: self._here.generate(requests, sampling, self._count))
        self.stale = self._forgets
        self.sync_counts |= self._forgets
        return generations

    def _count(self, done: int, total: int) -> None:
        """Show how far this process has come."""
        share = f" of rank {self._process.worker.rank}" if self.exchange.size > len(self.exchange.roles) else ""
        self._process.heart.advance(f"{done} of {total} responses{share}" if done < total else "")

    def sync_weights(self) -> SyncStats:
        """Bring the trainer's weights into the engine, which must generate next.

        Returns what counts in the metrics: nothing for a sync that an uninterrupted run would not have needed.
        """
        stats = self.exchange.run(self.name, lambda: self._here.sync())
        counts, self.stale, self.sync_counts = self.sync_counts, False, False
        return stats if counts else SyncStats()

    def take_weights(self, saved: Path) -> None:
        """Bring the weights of a training checkpoint's folder of this model, of any layout, into the engine."""
        self.exchange.run(self.name, lambda: self._here.take_weights(saved))

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Compute what updates need to know besides; `update` must follow."""
        self.exchange.run(self.name, lambda: self._here.prepare(batches))

    def update(self, batches: Sequence[Batch], num_updates: int) -> list[UpdateStats]:
        """Make `num_updates` optimizer steps, each on all batches. Raises `CheckFailed` where trainer and engine
        disagree.
        """
        updates = self.exchange.run(self.name, lambda: self._here.update(batches, num_updates))
        self.stale = self.sync_counts = True
        return updates

    def take_spent(self) -> Spent:
        """Return what the model's processes used since the last call."""
        return self.exchange.run(self.name, lambda: self._here.take_spent())

    def begin_save(self, folder: Path, *, background: bool) -> None:
        """Write the trainer's state, or have threads write a copy of it; `end_save` must follow."""
        self.exchange.run(self.name, lambda: self._here.begin_save(folder, background=background))

    def is_written(self) -> bool:
        """Return whether `end_save` need not wait for this rank of the model."""
        return self.exchange.run(self.name, lambda: self._here.is_written())

    def end_save(self) -> dict[str, FileSum]:
        """Complete it; sums of the large files that this rank of the model wrote."""
        return self.exchange.run(self.name, lambda: self._here.end_save())

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self.exchange.run(self.name, lambda: self._here.load(folder))
        self.stale = True


def load_models(
    names: Iterable[str],
    config: Config,
    exchange: Exchange,
    process: RankProcess,
    total_steps: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Model]:
    """Load the models of these names, one after the other; `total_steps` are the updates of those that are trained.

    Collective.
    """
    models = {}
    for name in names:
        for role in config.roles_of(name):
            check_known(config.models[name].model.path, role, config)
        process.heart.enter(f"loading the {name}")
        models[name] = Model(name, config, exchange, process, total_steps.get(name, 0))
    return models


class Role:
    """A part that a model takes: how it is asked, how its responses are read, and what it learns from.

    The same object in every process. Only a role that is trained has a `loss` and `advantages`.
    """

    def __init__(self, name: str, config: Config, exchange: Exchange, model: Model) -> None:
        self.name, self.config, self.exchange, self.model = name, config, exchange, model
        self.settings = config.roles[name]
        self.tokenizer = load_tokenizer(self.settings.model.path, self.settings.chat_template)
        prompt = role_prompt(config, name, self.tokenizer)
        self.template: Template = TEMPLATES[name](self.tokenizer, prompt)
        if self.settings.trainable:
            self.loss: LossSettings = loss_settings(config, name)
            self.advantages = OnceForAll.of(load_advantages(config, name), exchange)
        self.method_state: Any = None  # of the file of advantages

    def fits(self, prompt: Sequence[int]) -> bool:
        """Return whether the role's context has room for a prompt."""
        return len(prompt) <= self.settings.max_prompt_tokens

    def write(
        self, prompts_N: Sequence[list[int]], seeds_N: Sequence[int], *, greedy: bool = False
    ) -> list[Generation]:
        """Return a response to each prompt that fits the role's context, at the role's sampling settings or greedily.

        Collective; brings the trainer's weights into the engine first if they are not there.
        """
        fitting = [(prompt, seed) for prompt, seed in zip(prompts_N, seeds_N, strict=True) if self.fits(prompt)]
        return self.model.generate([GenerationRequest(*prompt) for prompt in fitting], self._sampling(greedy=greedy))

    def _sampling(self, *, greedy: bool = False) -> SamplingSettings:
        return SamplingSettings(
            temperature=0.0 if greedy else self.settings.temperature,
            top_p=1.0 if greedy else self.settings.top_p,
            max_tokens=self.settings.max_response_tokens,
            stop_token_ids=stop_token_ids(self.tokenizer, self.settings.model.path),
            stop_strings=self.settings.stop,
        )

    def go_on(self, texts_N: Sequence[list[int]], seeds_N: Sequence[int]) -> list[Generation]:
        """Return what follows each text, a prompt with the beginning of a response, at the role's sampling settings."""
        return self.model.generate([*map(GenerationRequest, texts_N, seeds_N)], self._sampling())

    def written(self, prompts_N: Sequence[list[int]], generations: Iterable[Generation]) -> list[Written]:
        """Return each prompt with its response; a prompt that does not fit the role's context was not asked."""
        of_fitting = iter(generations)
        return [(prompt, next(of_fitting)) if self.fits(prompt) else ([], NOT_ASKED) for prompt in prompts_N]


class Generator(Role):
    """The role that solves."""

    def prompt(self, statement: str) -> list[int]:
        """Return the token ids that ask for a solution."""
        return self.template.token_ids(self.tokenizer, {"question": statement})

    def prompts(self, task: Task, questions_N: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Return the token ids that ask for a solution of each question."""
        statements_N = [task.statement(question) for question in questions_N]
        prompts = {statement: self.prompt(statement) for statement in set(statements_N)}  # M rollouts of each
        return [prompts[statement] for statement in statements_N]

    def read(
        self,
        task: Task,
        questions_N: Sequence[dict[str, Any]],
        prompts_N: Sequence[list[int]],
        generations: Iterable[Generation],
    ) -> tuple[list[ReadSolution], Grading]:
        """Return the solutions, read from what `write` gave, and their grading, which has begun. Collective.

        The grading must be settled before a verdict is asked for.
        """
        statements_N = [task.statement(question) for question in questions_N]
        written_N = self.written(prompts_N, generations)
        solutions_N = read_solutions(
            task,
            questions_N,
            statements_N,
            written_N,
            self.tokenizer,
            self.exchange,
            self.template.opened,
            self.config.protocol,
        )
        return solutions_N, Grading(task, solutions_N, self.exchange)


class Verifier(Role):
    """The role that judges."""

    def prompts(self, solutions_N: Sequence[ReadSolution]) -> list[list[int]]:
        """Return the token ids that ask to judge each solution. Collective: the processes share the work."""
        return in_shares(self.exchange, self._prompts, solutions_N)

    def read(
        self, solutions_N: Sequence[ReadSolution], prompts_N: Sequence[list[int]], generations: Iterable[Generation]
    ) -> list[ReadVerification]:
        """Return a verification of each solution, read from what `write` gave. Collective."""
        written_N, rule = self.written(prompts_N, generations), self.config.algorithm.verifier_format
        return read_verifications(solutions_N, written_N, rule, self.tokenizer, self.exchange, self.template.opened)

    def _prompts(self, solutions: Sequence[ReadSolution]) -> list[list[int]]:
        """Return the token ids that ask to judge each of them."""
        return [
            self.template.token_ids(
                self.tokenizer,
                verifier_values(judged.statement, judged.solution.shown, len(judged.solution.steps)),
            )
            for judged in solutions
        ]


def request_seeds(seed: int, step: int, phase: str, count: int, rollbacks: int = 0) -> list[int]:
    """Return sampling seeds of `count` requests, a function of run seed, step, phase and the number of times that the
    run went back alone: a resumed run draws the same, one that went back does not.
    """
    phase_number = int.from_bytes(phase.encode(), "big")
    entropy = (seed, step, phase_number, *([rollbacks] if rollbacks else []))
    return np.random.SeedSequence(entropy).generate_state(count, np.uint32).tolist()
