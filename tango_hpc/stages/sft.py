"""Supervised fine-tuning of one model after the other, loss on responses only."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from tango_hpc.base.config import Config
from tango_hpc.base.config.role_prompts import role_prompt
from tango_hpc.base.config.schema import TAGGED, ProtocolConfig, SftRoleConfig
from tango_hpc.base.errors import CheckFailed, StoppedEarly
from tango_hpc.base.prompts import TEMPLATES, Template, response_ids, verifier_values
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.step_names import StepName
from tango_hpc.base.types import TrainSequence
from tango_hpc.models.parallel.collectives import max_over_ranks
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.parallel.ranks import this_device
from tango_hpc.models.trainer.checkpoints import Checkpoints
from tango_hpc.models.trainer.flops import peak_memory_bytes, total_peak
from tango_hpc.models.trainer.offload import give_back_freed_memory
from tango_hpc.models.trainer.policy import Policy
from tango_hpc.questions.data.sampler import QuestionSampler
from tango_hpc.questions.data.tables import evenly_spaced, read_sft_rows
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.protocol.tokenizer import load_tokenizer
from tango_hpc.questions.tasks.tiny import build_tiny_model
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages.journal import Clock, Journal
from tango_hpc.stages.sharing import in_shares
from tango_hpc.stages.throughput import Spent, usage_metrics

STAGE = "sft"


def fine_tune(config: Config, directory: RunDirectory, process: RankProcess, exchange: Exchange) -> None:
    """Fine-tune every model that `config.sft` names and write it as a Hugging Face folder."""
    named = config.sft.models
    total_steps = sum(settings.steps for settings in named.values())
    kept = config.checkpoint.model_copy(update={"keep_weights": 0})  # evaluation and export read those of training
    checkpoints = Checkpoints(directory, STAGE, kept, exchange)
    process.has_loaded()  # no engine, no graphs
    process.heart.enter("verifying the checkpoint")
    latest = checkpoints.latest()
    name = StepName.read(latest.name) if latest is not None else None
    resumed_step = name.step if name is not None else 0
    writes, trackers = exchange.is_first, config.run.trackers
    journal = Journal(directory, STAGE, process, total_steps, resumed_step, writes=writes, trackers=trackers)
    journal.checkpoints_set_aside(checkpoints.set_aside)
    first_step, reached = 0, next((role for role in named if latest is not None and (latest / role).is_dir()), None)
    if latest is not None and reached is not None:
        _check_counts(named, reached, json.loads((latest / "state.json").read_text()))
    for role, settings in named.items():
        last_step = first_step + settings.steps
        if resumed_step < last_step or role == reached or not (settings.output / "config.json").exists():
            here = latest if role == reached else None
            FineTuning(config, role, settings, checkpoints, journal, process, exchange, first_step).finish(here)
            gc.collect()  # Megatron-core's modules refer to each other in circles; the next role needs their memory
            give_back_freed_memory(this_device())
        first_step = last_step
    journal.ended("done")


def _check_counts(named: Mapping[str, SftRoleConfig], reached: str, state: Mapping[str, Any]) -> None:
    """Steps that were done stay as they are: raise `CheckFailed` where a role has fewer now, or one that was done other
    ones.
    """
    before = list(named)[: list(named).index(reached)]
    first_step = sum(named[role].steps for role in before)
    began = state.get("first_step", first_step)
    done = state["step"] - began
    if began != first_step:
        raise CheckFailed(
            f"sft.generator.steps: the generator was done after {began}, it is {first_step} now, and the verifier has"
            f" been reached; set it back to {began}, or begin in another run.dir"
        )
    if done > named[reached].steps:
        raise CheckFailed(
            f"sft.{reached}.steps: {named[reached].steps}, and {done} are done already; give {done} or more, or begin"
            " in another run.dir"
        )


class FineTuning:
    """The fine-tuning of one model, named after its first role; its steps are numbered from `first_step` + 1 on.

    A model that takes both roles learns from the rows of both.
    """

    def __init__(
        self,
        config: Config,
        role: str,
        settings: SftRoleConfig,
        checkpoints: Checkpoints,
        journal: Journal,
        process: RankProcess,
        exchange: Exchange,
        first_step: int,
    ) -> None:
        self.config, self.role, self.settings = config, role, settings
        self.checkpoints, self.journal, self.process, self.first_step = checkpoints, journal, process, first_step
        journal.phase("loading", role=role)
        build = settings.init.build
        if build is not None and not settings.init.path.exists():
            if dist.get_rank() == 0:
                build_tiny_model(settings.init.path, build, seed=config.seed)
            dist.barrier()
        self.held_out: dict[str, list[TrainSequence]] = {}
        train: list[tuple[float, TrainSequence]] = []
        self.counts = Counter({"data/rows": 0, "data/too_long": 0})
        for name, data in config.sft.data_of(role).items():
            rows = self._read(name, data, exchange)
            train += [(i / len(rows), sequence) for i, sequence in enumerate(rows)]
        # Those of two roles are spread evenly among each other, each in the order of its file.
        self.train = [sequence for _, sequence in sorted(train, key=itemgetter(0))]
        self.sampler = QuestionSampler(len(self.train), config.seed, shuffle=settings.shuffle)
        self.policy = Policy(
            config.models[role],
            config.launch.dtype,
            model_dir=settings.init.path,
            optimizer=settings.optimizer,
            total_steps=settings.steps,
            products=config.sft.products,
            seed=f"{config.seed} {role}",
        )
        self.peak = total_peak(self.policy.dtype, self.policy.device, config.launch.peak_tflops)

    def _read(self, role: str, data: Path, exchange: Exchange) -> list[TrainSequence]:
        """Return the rows of a role to train on; keep some to evaluate on, leave out what does not fit. Collective."""
        folder, settings, eval_rows = self.settings.init.path, self.config.roles[role], self.settings.eval_rows
        tokenizer = load_tokenizer(folder, settings.chat_template)
        template = TEMPLATES[role](tokenizer, role_prompt(self.config, role, tokenizer))
        rows = read_sft_rows(data, role)
        sequences = in_shares(
            exchange,
            lambda some: [sft_sequence(role, row, tokenizer, template, folder, self.config.protocol) for row in some],
            rows,
        )
        fitting = [sequence for sequence in sequences if sequence.num_tokens <= settings.longest]
        limit = f"{settings.longest} tokens (max_prompt_tokens + max_response_tokens of the {role})"
        self.counts.update({"data/rows": len(rows), "data/too_long": len(rows) - len(fitting)})
        if len(fitting) < len(rows):
            self.journal.note(
                f"{data}: {len(rows) - len(fitting):,} of {len(rows):,} rows are left out, longer than {limit}"
            )
        if len(fitting) <= eval_rows:
            raise CheckFailed(
                f"{data}: {len(fitting)} of {len(rows)} rows fit {limit}, and {eval_rows} are kept for evaluation "
                f"(sft.{self.role}.eval_rows): nothing is left to train on"
            )
        held_out = set(evenly_spaced(range(len(fitting)), eval_rows))  # the rows may be a curriculum
        self.held_out[role] = [sequence for i, sequence in enumerate(fitting) if i in held_out]
        return [sequence for i, sequence in enumerate(fitting) if i not in held_out]

    def finish(self, checkpoint: Path | None) -> None:
        """Fine-tune from `checkpoint`, or from the start, and export the folder."""
        step = 0
        if checkpoint is not None:
            state = self.checkpoints.load(checkpoint, {self.role: self.policy})
            step = state["step"] - self.first_step
            self.sampler.load_state_dict(state["sampler"])
        if step == 0:
            self._evaluate(self.first_step)
        while step < self.settings.steps:
            step = self._step(step)
            last = step == self.settings.steps
            if last or (self.settings.eval_every and step % self.settings.eval_every == 0):
                self._evaluate(self.first_step + step)
            save_every = self.config.checkpoint.every_steps
            self.checkpoints.complete(wait=False)
            if not last and save_every and step % save_every == 0:
                self._save(step, background=bool(self.config.checkpoint.background))
            if not last and self.process.check("between steps"):
                self._save(step)
                self.journal.ended("stopped")
                raise StoppedEarly(f"stopped after {step} of {self.settings.steps} steps of the {self.role}")
        self.journal.phase("exporting", role=self.role)
        self.policy.export_hf(self.settings.output)
        self._save(step)

    def _step(self, step: int) -> int:
        self.journal.phase("train", role=self.role)
        clock = Clock()
        with clock("train"):
            batch = [self.train[index] for index in self.sampler.draw(self.settings.batch_size)]
            stats = self.policy.update_sft(batch)
        row: dict[str, Any] = {
            "step": self.first_step + step + 1,
            "role": self.role,
            "seconds/train": clock.so_far()["train"],
            "seconds/total": clock.so_far()["train"],
            "tokens/trained": stats.num_tokens,
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "skipped": stats.skipped,
            **self.counts,
        }
        device = self.policy.device
        (peak_bytes,) = max_over_ranks([peak_memory_bytes(device)])
        row |= usage_metrics(
            row, stats.operations, dist.get_world_size(), {self.role: Spent({}, int(peak_bytes), self.peak)}
        )
        self.journal.step_done(row)
        return step + 1

    def _evaluate(self, step: int) -> None:
        self.journal.phase("evaluation", role=self.role)
        losses = {f"{role}/eval_loss": self.policy.evaluate_sft(rows) for role, rows in self.held_out.items()}
        self.journal.evaluated(step, losses)

    def _save(self, step: int, *, background: bool = False) -> None:
        self.journal.phase("saving", role=self.role)
        state = {"step": self.first_step + step, "first_step": self.first_step, "sampler": self.sampler.state_dict()}
        self.checkpoints.save(self.first_step + step, "", {self.role: self.policy}, state, background=background)


def sft_sequence(
    role: str,
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    template: Template | None = None,
    folder: Path | None = None,
    protocol: ProtocolConfig = TAGGED,
) -> TrainSequence:
    """Return a row as the prompt that the role gets in training and the response that it should give, stop token
    included.

    By the shipped prompt without a `template`. `folder`: the model's, which names the stop tokens.
    """
    template = template or TEMPLATES[role](tokenizer, None)
    values: dict[str, object] = {"question": row["question"]}
    if role == "verifier":
        solution = read_solution(row["solution_text"], protocol)
        values = verifier_values(row["question"], solution.shown, len(solution.steps))
    response = row["solution_text" if role == "generator" else "verification_text"]
    prompt_ids = template.token_ids(tokenizer, values)
    return TrainSequence(prompt_ids, response_ids(response, tokenizer, template, folder))
