"""The roles: each of the two models with its trainer, its engine, and the path of weights between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tango_hpc.config import Config
from tango_hpc.config.roles import RoleConfig
from tango_hpc.policy.policy import Policy
from tango_hpc.protocol.alignment import response_text
from tango_hpc.protocol.prompts import generator_prompt_ids, read_prompt, stop_token_ids, verifier_prompt_ids
from tango_hpc.protocol.tokenizer import load_tokenizer
from tango_hpc.reshard.sync import SyncStats, WeightSync
from tango_hpc.rollout.engine import RolloutEngine
from tango_hpc.stages.responses import (
    NOT_ASKED,
    ReadSolution,
    ReadVerification,
    Response,
    read_solutions,
    read_verifications,
)
from tango_hpc.tasks import Task
from tango_hpc.types import Generation, GenerationRequest, SamplingSettings

# Takes the generating and gives its result, or what it gave before an interruption.
Through = Callable[[Callable[[], list[Generation]]], list[Generation]]


def straight(generate: Callable[[], list[Generation]]) -> list[Generation]:
    """Just generate."""
    return generate()


class Role:
    """A model that is asked, and trained where its settings say so.

    `policy` is None for a role that is not trained: its engine then holds the weights of `model.path`.
    """

    def __init__(self, name: str, config: Config, total_steps: int = 0) -> None:
        self.name, self.config = name, config
        self.settings = config.roles[name]
        self.tokenizer = load_tokenizer(self.settings.model.path, self.settings.chat_template)
        self.prompt_text = read_prompt(
            name, self.settings.prompt, self.settings.chat_template_arguments, self.tokenizer
        )
        self.policy: Policy | None = None
        if self.settings.trainable:
            self.policy = Policy(
                self.settings,
                config.launch.dtype,
                optimizer=self.settings.optimizer,
                total_steps=total_steps,
                with_reference=config.algorithm.kl_coef > 0,
            )
            self.policy.offload()
        self.engine = make_engine(self.settings, config, load_weights=self.policy is None)
        self.engine.sleep()
        self._sync = WeightSync(self.policy, self.engine, config.reshard) if self.policy is not None else None

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether the role's context has room for a prompt."""
        return len(prompt) <= self.settings.max_prompt_tokens

    def respond(
        self, prompts_N: Sequence[list[int]], seeds_N: Sequence[int], *, greedy: bool, through: Through
    ) -> list[Response]:
        """What the role writes to each prompt that fits its context. Collective."""
        fitting = [(prompt, seed) for prompt, seed in zip(prompts_N, seeds_N, strict=True) if self.fits(prompt)]
        generations = iter(through(lambda: self._generate(fitting, greedy)))
        responses_N = []
        for prompt in prompts_N:
            asked = self.fits(prompt)
            generation = next(generations) if asked else NOT_ASKED
            text = response_text(generation.token_ids, self.tokenizer)
            responses_N.append(Response(prompt if asked else [], generation, text))
        return responses_N

    def _generate(self, prompts: Sequence[tuple[list[int], int]], greedy: bool) -> list[Generation]:
        """One response to each (prompt, seed), at the role's sampling settings or greedily."""
        sampling = SamplingSettings(
            temperature=0.0 if greedy else self.settings.temperature,
            top_p=1.0 if greedy else self.settings.top_p,
            max_tokens=self.settings.max_response_tokens,
            stop_token_ids=stop_token_ids(self.tokenizer),
        )
        self.engine.wake()
        generations = self.engine.generate([GenerationRequest(*prompt) for prompt in prompts], sampling)
        self.engine.sleep()
        return generations

    def sync_weights(self) -> SyncStats:
        """Bring the trainer's weights into the engine. Collective."""
        assert self.policy is not None and self._sync is not None, f"the {self.name} has no trainer"
        self.policy.onload(weights_only=True)
        self.policy.offload(keep_weights=True)
        self.engine.wake(weights_only=True)
        stats = self._sync.sync()
        self.engine.sleep()
        self.policy.offload()
        return stats

    def take_weights(self, saved: Path) -> None:
        """Bring the weights of a training checkpoint's folder of this role, of any layout, into the engine. Collective."""
        if self.policy is None:
            self.policy = Policy(self.settings, self.config.launch.dtype)
            self._sync = WeightSync(self.policy, self.engine, self.config.reshard)
        self.policy.onload(weights_only=True)
        self.policy.load(saved)
        self.sync_weights()

    def weight_differences(self) -> str:
        """Which tensors of the engine are not the trainer's, in words. Collective, with the policy on its device."""
        assert self._sync is not None, f"the {self.name} has no trainer"
        self.engine.wake(weights_only=True)
        differing = self._sync.find_mismatches()
        self.engine.sleep()
        if differing:
            return "these tensors of the engine are not the trainer's:\n" + "\n".join(differing)
        return "all weights of the engine are the trainer's: they compute differently (precision, kernels)"


class Generator(Role):
    """The role that solves."""

    def prompt(self, statement: str) -> list[int]:
        """The token ids that ask for a solution."""
        return generator_prompt_ids(statement, self.tokenizer, self.prompt_text)

    def ask(
        self,
        task: Task,
        questions_N: Sequence[dict[str, Any]],
        seeds_N: Sequence[int],
        *,
        greedy: bool = False,
        through: Through = straight,
    ) -> list[ReadSolution]:
        """A solution of each question, read and graded. Collective."""
        statements_N = [task.statement(question) for question in questions_N]
        prompts_N = [self.prompt(statement) for statement in statements_N]
        responses_N = self.respond(prompts_N, seeds_N, greedy=greedy, through=through)
        return read_solutions(task, questions_N, statements_N, responses_N, self.tokenizer)


class Verifier(Role):
    """The role that judges."""

    def judge(
        self,
        solutions_N: Sequence[ReadSolution],
        seeds_N: Sequence[int],
        *,
        greedy: bool = False,
        through: Through = straight,
    ) -> list[ReadVerification]:
        """A verification of each solution, read. Collective."""
        prompts_N = [
            verifier_prompt_ids(
                judged.statement,
                judged.response.text,
                len(judged.solution.steps),
                self.tokenizer,
                self.prompt_text,
            )
            for judged in solutions_N
        ]
        responses_N = self.respond(prompts_N, seeds_N, greedy=greedy, through=through)
        return read_verifications(solutions_N, responses_N, self.config.algorithm.verifier_format)


def make_engine(settings: RoleConfig, config: Config, *, load_weights: bool) -> RolloutEngine:
    """A role's engine. Collective."""
    rollout = settings.rollout
    return RolloutEngine(
        settings.model.path,
        tensor=rollout.tensor,
        dtype=config.launch.dtype,
        max_model_len=settings.max_prompt_tokens + settings.max_response_tokens,
        max_num_seqs=rollout.max_num_seqs,
        max_batched_tokens=rollout.max_batched_tokens,
        device=config.launch.device,
        load_weights=load_weights,
        kv_cache_gb=rollout.kv_cache_gb,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
    )


def request_seeds(seed: int, step: int, phase: str, count: int) -> list[int]:
    """Sampling seeds of `count` requests, a function of run seed, step and phase alone: a resumed run draws the same."""
    phase_number = int.from_bytes(phase.encode(), "big")
    return np.random.SeedSequence((seed, step, phase_number)).generate_state(count, np.uint32).tolist()
