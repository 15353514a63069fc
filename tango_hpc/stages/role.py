"""A role: one of the two models with its trainer, its engine, and the path of weights between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tango_hpc.config import Config
from tango_hpc.policy.policy import Policy
from tango_hpc.protocol.prompts import stop_token_ids
from tango_hpc.protocol.tokenizer import load_tokenizer
from tango_hpc.reshard.sync import SyncStats, WeightSync
from tango_hpc.rollout.engine import RolloutEngine
from tango_hpc.types import Generation, GenerationRequest, SamplingSettings


class Role:
    """Generator or verifier. They differ in configuration, prompts and rewards; this class knows none of the three.

    `policy` is None for a role that is not trained: its engine then holds the weights of `model.path` for good.
    """

    def __init__(self, name: str, config: Config, total_steps: int) -> None:
        self.name = name
        self.settings = config.roles[name]
        self.tokenizer = load_tokenizer(self.settings.model.path)
        self.policy: Policy | None = None
        if self.settings.trainable:
            self.policy = Policy(
                self.settings.model.path,
                parallel=self.settings.parallel,
                optimizer=self.settings.optimizer,
                dtype=config.launch.dtype,
                micro_batch_tokens=self.settings.micro_batch_tokens,
                with_reference=config.algorithm.kl_coef > 0,
                reference_dir=self.settings.model.reference_path,
                total_steps=total_steps,
                recompute=self.settings.recompute_activations,
            )
            self.policy.offload()
        rollout = config.rollout
        self.engine = RolloutEngine(
            self.settings.model.path,
            tensor=rollout.tensor,
            dtype=config.launch.dtype,
            max_model_len=self.settings.max_prompt_tokens + self.settings.max_response_tokens,
            max_num_seqs=rollout.max_num_seqs,
            max_batched_tokens=rollout.max_batched_tokens,
            device=config.launch.device,
            load_weights=self.policy is None,
            kv_cache_gb=rollout.kv_cache_gb,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
        )
        self.engine.sleep()
        self._sync = WeightSync(self.policy, self.engine, config.reshard) if self.policy is not None else None

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int], *, greedy: bool = False) -> list[Generation]:
        """One response to each prompt (token ids), at the role's sampling settings or greedily. Collective."""
        sampling = SamplingSettings(
            temperature=0.0 if greedy else self.settings.temperature,
            top_p=1.0 if greedy else self.settings.top_p,
            max_tokens=self.settings.max_response_tokens,
            stop_token_ids=stop_token_ids(self.tokenizer),
        )
        requests = [GenerationRequest(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        self.engine.wake()
        generations = self.engine.generate(requests, sampling)
        self.engine.sleep()
        return generations

    def sync_weights(self) -> SyncStats:
        """Bring the trainer's weights into the engine. Collective."""
        assert self.policy is not None and self._sync is not None, f"the {self.name} is not trained"
        self.policy.onload(weights_only=True)
        self.policy.offload(keep_weights=True)
        self.engine.wake(weights_only=True)
        stats = self._sync.sync()
        self.engine.sleep()
        self.policy.offload()
        return stats

    def weight_differences(self) -> str:
        """Which tensors of the engine are not the trainer's, in words. Collective, with the policy on its device."""
        assert self._sync is not None, f"the {self.name} is not trained"
        self.engine.wake(weights_only=True)
        differing = self._sync.find_mismatches()
        self.engine.sleep()
        if differing:
            return "these tensors of the engine are not the trainer's:\n" + "\n".join(differing)
        return "all weights of the engine are the trainer's: they compute differently (precision, kernels)"


def request_seeds(seed: int, step: int, phase: str, count: int) -> list[int]:
    """Sampling seeds of `count` requests, a function of run seed, step and phase alone: a resumed run draws the same."""
    phase_number = int.from_bytes(phase.encode(), "big")
    return np.random.SeedSequence((seed, step, phase_number)).generate_state(count, np.uint32).tolist()
