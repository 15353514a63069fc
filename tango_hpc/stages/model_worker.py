"""A model in its own processes: its trainer, its engine, and the path of weights between them.

On a GPU the models take turns, and so do a model's trainer and engine. What a method of `ModelWorker` has used is given
back when it returns, but for what the next call is known to need: after `sync` the weights of the engine, after
`prepare` the trainer. The engine of a run's only model stays awake until its trainer needs the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from tango_hpc.base.config import Config
from tango_hpc.base.config.roles import RoleConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.manifest import FileSum
from tango_hpc.base.types import Generation, GenerationRequest, SamplingSettings
from tango_hpc.models.engine.capacity import GIB, cache_problem, engine_memory
from tango_hpc.models.engine.engine import RolloutEngine, take_stream
from tango_hpc.models.parallel.collectives import max_over_ranks
from tango_hpc.models.parallel.ranks import this_device
from tango_hpc.models.trainer.flops import peak_memory_bytes, total_peak
from tango_hpc.models.trainer.loss import Batch, LogprobGapError, UpdateStats
from tango_hpc.models.trainer.offload import give_back_freed_memory
from tango_hpc.models.trainer.policy import Policy
from tango_hpc.models.weight_sync.sync import SyncStats, WeightSync
from tango_hpc.stages.throughput import Spent


class ModelWorker:
    """The shards of this process. Every method is collective over the processes of the model.

    A model that is not trained has no policy: its engine holds the weights of `model.path`, or those that it has taken
    from a checkpoint.
    """

    def __init__(self, name: str, config: Config, total_steps: int) -> None:
        self._name, self._config, self._settings = name, config, config.models[name]
        self._is_alone = len(config.models) == 1
        self._policy: Policy | None = None
        if config.launch.device == "cuda":
            take_stream()
        if self._settings.trainable:
            self._policy = Policy(
                self._settings,
                config.launch.dtype,
                optimizer=self._settings.optimizer,
                total_steps=total_steps,
                with_reference=config.algorithm.kl_coef > 0,
                products=config.train.products,
                seed=f"{config.seed} {name}",
            )
            self._policy.offload()
        self.engine = make_engine(self._settings, config, name, load_weights=self._policy is None)
        self.engine.sleep()
        self._is_awake = False  # the engine
        self._sync = WeightSync(self._policy, self.engine, config.reshard) if self._policy is not None else None
        self._peak = total_peak(self.engine.dtype, self.engine.device, config.launch.peak_tflops)
        self._turns: dict[tuple[str, str], float] = {}
        self._give_back()

    @contextmanager
    def _turn(self, method: str, turn: str) -> Iterator[None]:
        """Note how long a turn on the GPU takes."""
        start = time.perf_counter()
        yield
        self._turns[method, turn] = self._turns.get((method, turn), 0.0) + time.perf_counter() - start

    def take_spent(self) -> Spent:
        """Return what this model used since the last call. Collective."""
        keys = sorted(self._turns)
        *seconds, peak = max_over_ranks([*(self._turns[key] for key in keys), peak_memory_bytes(self.engine.device)])
        self._turns = {}
        return Spent(dict(zip(keys, seconds, strict=True)), int(peak), self._peak)

    @property
    def policy(self) -> Policy:
        """The trainer."""
        assert self._policy is not None, f"the {self._name} has no trainer"
        return self._policy

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingSettings, tell: Callable[[int, int], None]
    ) -> list[Generation]:
        """Complete every request, in their order; `tell` as in `RolloutEngine.generate`."""
        with self._turn("generate", "wake"):
            self.engine.wake()
            self._is_awake = True
        generations = self.engine.generate(requests, sampling, tell)
        if not self._is_alone:
            with self._turn("generate", "sleep"):
                self._rest()
        return generations

    def _rest(self) -> None:
        """Put the engine to sleep, if it is awake."""
        if self._is_awake:
            self._is_awake = False
            self.engine.sleep()
            self._give_back()

    def sync(self) -> SyncStats:
        """Bring the trainer's weights into the engine, which stays awake without a cache."""
        assert self._sync is not None
        with self._turn("sync", "sleep"):
            self._rest()
        with self._turn("sync", "onload"):
            self.policy.onload(weights_only=True)
        with self._turn("sync", "wake"):
            self.engine.wake(weights_only=True)
            self._is_awake = True
        stats = self._sync.sync()
        with self._turn("sync", "offload"):
            self.policy.offload(weights_changed=False)
        return stats

    def take_weights(self, saved: Path) -> None:
        """Bring the weights of a training checkpoint's folder of this model, of any layout, into the engine."""
        if self._policy is None:
            self._policy = Policy(self._settings, self._config.launch.dtype)
            self._sync = WeightSync(self._policy, self.engine, self._config.reshard)
        self._rest()
        self.policy.load(saved)
        self._give_back()  # before the engine wakes beside it
        self.sync()
        self._rest()

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Give the sequences what the updates need to know besides; `update` must follow."""
        with self._turn("prepare", "sleep"):
            self._rest()
        with self._turn("prepare", "onload"):
            self.policy.onload()
        for batch in batches:
            self.policy.prepare(batch.sequences, batch.loss)

    def update(self, batches: Sequence[Batch], num_updates: int) -> list[UpdateStats]:
        """Make `num_updates` optimizer steps, each on all batches.

        Raises `CheckFailed` where trainer and engine disagree by too much, with the weights that differ.
        """
        updates = []
        try:
            for number in range(1, num_updates + 1):
                if number > 1:
                    with self._turn("update", "logprobs"):
                        for batch in batches:
                            self.policy.prepare_next(batch.sequences, batch.loss)
                updates.append(self.policy.update_jointly(batches, last=number == num_updates))
        except LogprobGapError as error:
            raise CheckFailed(f"{self._name}: {error}; {self._weight_differences()}") from error
        with self._turn("update", "offload"):
            self.policy.offload()
            self._give_back()
        return updates

    def begin_save(self, folder: Path, *, background: bool) -> None:
        """Write what `load` needs to go on from the same bits, or have a thread write a copy; `end_save` must
        follow.
        """
        self.policy.begin_save(folder, background=background)
        self._give_back()

    def is_written(self) -> bool:
        """Return whether `end_save` need not wait for this process."""
        return self.policy.is_written()

    def end_save(self) -> dict[str, FileSum]:
        """Complete what `begin_save` has begun. OSError where it cannot be written."""
        return self.policy.end_save()

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        self._rest()
        self.policy.load(folder)
        self._give_back()

    def _weight_differences(self) -> str:
        """Return which tensors of the engine are not the trainer's, in words."""
        assert self._sync is not None
        if self.engine.forgets_when_asleep:  # the weights that generated are gone; are those that would come now right?
            self.policy.offload(keep_weights=True)
            self.engine.wake(weights_only=True)
            self._sync.sync()
        differing = self._sync.find_mismatches()
        if differing:
            return "these tensors of the engine are not the trainer's:\n" + "\n".join(differing)
        return "all weights of the engine are the trainer's: they compute differently (precision, kernels)"

    def _give_back(self) -> None:
        """Leave the memory of the GPU, or of the machine, to who is next."""
        give_back_freed_memory(self.engine.device)


def make_engine(settings: RoleConfig, config: Config, name: str, *, load_weights: bool) -> RolloutEngine:
    """Return the engine of the role `name`. Collective over its processes. Raises `CheckFailed` where its cache has no
    room.
    """
    rollout, device = settings.rollout, this_device()
    gpu_bytes = 0
    if device.type == "cuda":  # of the smallest GPU, because all engines of a role must start alike
        gpu_bytes = -int(max_over_ranks([-torch.cuda.get_device_properties(device).total_memory])[0])
    problem = cache_problem(config, name, gpu_bytes)
    if problem is not None:
        raise CheckFailed(problem)
    memory = engine_memory(config, name, gpu_bytes)
    if dist.get_rank() == 0:
        print(
            f"the {name}'s engine takes up to {memory.num_seqs:,} sequences at once, with a KV cache of "
            f"{memory.cache / GIB:.2f} GiB",
            flush=True,
        )
    return RolloutEngine(
        settings.model.path,
        tensor=rollout.tensor,
        dtype=config.launch.dtype,
        max_model_len=settings.longest,
        max_num_seqs=memory.num_seqs,
        max_batched_tokens=rollout.max_batched_tokens,
        device=config.launch.device,
        load_weights=load_weights,
        kv_cache_bytes=memory.cache,
        gpu_share=memory.total / gpu_bytes if gpu_bytes else 0.0,
        enforce_eager=rollout.enforce_eager,
    )
