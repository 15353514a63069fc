"""A whole stage with the GPU's memory kept account of instead of used: two ranks, a process of either role on each.

The stages, roles, workers, engines, the trainers' `DeviceMemory` and the exchange are the real ones, in one thread for
each process. Stand-ins are what would touch a GPU: vLLM, the trainer's mathematics, the messages of a weight sync and
CUDA's allocator. They write down what a process takes of its rank's GPU and gives back, and what it works on. What
only a GPU can tell: how much it all takes, that copies on streams are done in time, what libraries take by themselves.
"""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakSet

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from tango_hpc.base.config import Config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.base.types import Generation, TrainSequence
from tango_hpc.models.engine import engine as engine_module
from tango_hpc.models.engine.engine import RolloutEngine
from tango_hpc.models.parallel import exchange as exchange_module
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.models.trainer import pinned_memory as host_memory
from tango_hpc.models.trainer import saved_state
from tango_hpc.models.trainer.loss import Batch, LogprobGapError, LossSettings, UpdateStats
from tango_hpc.models.trainer.offload import DeviceMemory
from tango_hpc.models.trainer.policy import Policy
from tango_hpc.models.weight_sync.sync import SyncStats
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages import model_worker, sft

RANKS = 2
PATIENCE_SECONDS = 30.0  # a test that breaks one role waits this long for the other

# What lies on a GPU. All but vLLM's weights and cache come from PyTorch's allocator, which keeps them until it is told.
TRAINER = frozenset({"trainer weights", "optimizer", "gradients", "trainer activations"})
ENGINE = frozenset({"engine weights", "kv cache", "engine activations"})
PARTS_BY_TAG = {"weights": "engine weights", "kv_cache": "kv cache"}  # of vLLM's sleep mode
FOR_A_SYNC = frozenset({"trainer weights", "engine weights", "sync buffers"})


@dataclass(frozen=True)
class Event:
    """Something that the process of `role` on `rank` did.

    take, return: `parts` came to lie on its GPU, or left it. work: it did `name`, for which `parts` must lie there.
    together: all ranks of the role have come to the collective `name` and now do it, each on its `parts`; `rank` is -1.
    sleep, wake: it asked vLLM for that; `parts` are those of which vLLM would refuse it. generate: with weights of
    `versions[0]` updates, while the trainer's have had `versions[1]`.
    """

    kind: Literal["take", "return", "work", "together", "sleep", "wake", "generate"]
    role: str
    rank: int = -1
    name: str = ""
    parts: frozenset[str] = frozenset()
    versions: tuple[int | None, int] = (0, 0)


Held = dict[tuple[int, str], set[str]]


def replay(events: Sequence[Event]) -> Iterator[tuple[Event, Held]]:
    """Each event with what the processes, by rank and role, hold when it happens."""
    held: Held = defaultdict(set)
    for event in events:
        yield event, held
        if event.kind == "take":
            held[event.rank, event.role] |= event.parts
        elif event.kind == "return":
            held[event.rank, event.role] -= event.parts


class Rehearsal:
    """What happened, in order, over all processes."""

    def __init__(self, stop: tuple[str, int] | None = None, gap: bool = False) -> None:
        """`stop`: (phase, n), told so at the n-th safe point before `phase`. `gap`: trainers and engines disagree."""
        self.events: list[Event] = []
        self.stop, self.gap = stop, gap
        self._lock = threading.Lock()
        self._here = threading.local()

    def note(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    @property
    def here(self) -> Process:
        """The process of this thread."""
        return self._here.process  # type: ignore[no-any-return]

    def play(
        self, config: Config, directory: RunDirectory, body: Callable[..., None], roles: Sequence[str]
    ) -> list[str]:
        """Run a stage in all processes. What they raised, each kind of error once, the stages' own ends included.

        A process that has raised breaks its peers' barrier. What they raise of that is left out where the cause is
        there.
        """
        peers = {role: Peers() for role in roles}
        store, errors = HashStore(), list[Exception]()

        def main(rank: int, role: str) -> None:
            self._here.process = Process(self, rank, role, peers[role])
            try:
                place = PrefixStore(f"{rank}", store)
                group = ProcessGroupGloo(place, roles.index(role), len(roles), timedelta(seconds=PATIENCE_SECONDS))
                exchange = Exchange(roles, role, group if len(roles) > 1 else None)
                process = RankProcess(directory, Worker(rank, role), reads_file=rank == 0)
                process.stop.agree = exchange.any
                if self.stop is not None and exchange.is_first:
                    process.check = self._stopping(process)  # type: ignore[method-assign]
                body(config, directory, process, exchange)
            except Exception as error:
                errors.append(error)
                peers[role].barrier.abort()

        threads = [threading.Thread(target=main, args=(rank, role)) for rank in range(RANKS) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        return sorted({f"{type(error).__name__}: {error}" for error in causes or errors})

    def _stopping(self, process: RankProcess) -> Callable[[str], bool]:
        """`process.check` that hears of the stop where it is to."""
        check, seen = process.check, list[str]()

        def checked(phase: str) -> bool:
            seen.append(phase)
            if self.stop is not None and self.stop == (phase, seen.count(phase)):
                process.stop.receive(signal.SIGTERM)
            return check(phase)

        return checked


class Barrier:
    """`threading.Barrier` that breaks for those alone who wait: who is on the way out of it has passed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here, self._times, self._broken = 0, 0, False

    def wait(self) -> bool:
        """Until all ranks are here; whether this was the last."""
        with self._changed:
            times, self._here = self._times, self._here + 1
            if self._here == RANKS:
                self._here, self._times = 0, times + 1
                self._changed.notify_all()
                return True
            self._changed.wait_for(lambda: self._times > times or self._broken, PATIENCE_SECONDS)
            if self._times == times:
                raise threading.BrokenBarrierError
            return False

    def abort(self) -> None:
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class Peers:
    """The ranks of a role."""

    def __init__(self) -> None:
        self.barrier = Barrier()
        self.values: list[Any] = [None] * RANKS


class Process:
    """One role on one rank, and what it has of the rank's GPU."""

    def __init__(self, rehearsal: Rehearsal, rank: int, role: str, peers: Peers) -> None:
        self.rehearsal, self.rank, self.role, self.peers = rehearsal, rank, role, peers
        self.kept: set[str] = set()  # by PyTorch's allocator, though free
        self.trainers: WeakSet[Trainer] = WeakSet()  # those that the process has not dropped, one in all stages but sft
        self.num_trainers = 0
        self.num_updates = 0
        self.in_storages: set[str] = set()

    def note(self, kind: Any, parts: Sequence[str] | frozenset[str] = (), name: str = "", **more: Any) -> None:
        self.rehearsal.note(Event(kind, self.role, self.rank, name, frozenset(parts), **more))

    def take(self, *parts: str) -> None:
        self.note("take", parts)

    def use_for_a_while(self, part: str) -> None:
        """Take memory from PyTorch's allocator and free it again."""
        self.note("take", [part])
        self.kept.add(part)

    def look_at_storages(self) -> None:
        """Note which of the trainer's storages have come or gone."""
        found = {part for trainer in self.trainers for part in trainer.on_gpu()}
        if found - self.in_storages:
            self.note("take", found - self.in_storages)
        self.kept = (self.kept | (self.in_storages - found)) - found
        self.in_storages = found

    def empty_cache(self) -> None:
        self.look_at_storages()
        if self.kept:
            self.note("return", self.kept)
        self.kept = set()

    def work(self, name: str, *parts: str, together: bool = True) -> None:
        """Do `name`, with the other ranks of the role where it is a collective."""
        self.look_at_storages()
        self.note("work", parts, name)
        if together:
            self.gather(None, name, *parts)

    def gather(self, value: Any, name: str = "", *parts: str) -> list[Any]:
        """The values of all ranks of the role."""
        self.peers.values[self.rank] = value
        if self.peers.barrier.wait() and name:
            self.rehearsal.note(Event("together", self.role, name=name, parts=frozenset(parts)))
        values = list(self.peers.values)
        self.peers.barrier.wait()
        return values


class Trainer(torch.nn.Module):
    """Weights, optimizer state and gradients in one storage each. All elements of either are the number of updates."""

    def __init__(self, process: Process, trained: bool) -> None:
        super().__init__()
        self.suffix = f" of trainer {process.num_trainers + 1}" if process.num_trainers else ""
        process.num_trainers += 1
        process.trainers.add(self)
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.state = torch.zeros(128)
        self.trained = trained
        if trained:
            self.weight.main_grad = torch.zeros(64)  # type: ignore[attr-defined]

    def tensors(self) -> list[torch.Tensor]:
        return [self.state]

    def on_gpu(self) -> set[str]:
        tensors = {"trainer weights": self.weight}
        if self.trained:
            tensors |= {"optimizer": self.state, "gradients": self.weight.main_grad}  # type: ignore[dict-item]
        return {f"{name}{self.suffix}" for name, tensor in tensors.items() if tensor.untyped_storage().nbytes()}

    def version(self) -> int:
        """After how many updates; what comes back from the host must be whole, and all of one time."""
        (number,) = {*self.weight.tolist(), *(self.state.tolist() if self.trained else ())}
        return int(number)


def make_stand_ins(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them in the places of what would touch a GPU."""

    class StandInPolicy(Policy):
        """Its memory and what moves it are real, its mathematics is counting."""

        adapters = None

        def __init__(self, settings: Any, dtype: str, *, optimizer: Any = None, **_: Any) -> None:
            self.trainer = Trainer(rehearsal.here, optimizer is not None)
            self.trainer.owner = self  # a circle, as Megatron-core's modules have them
            self.num_updates = 0
            self._saving = None
            self.device, self.dtype = torch.device("cuda"), torch.bfloat16
            self._memory = DeviceMemory(self.trainer, self.trainer if optimizer else None)  # type: ignore[arg-type]
            rehearsal.here.work("load the trainer", f"trainer weights{self.trainer.suffix}")

        def _state(self) -> Any:
            return self

        def where_all_is(self) -> list[torch.Tensor]:
            return [self._memory.where_it_is(tensor) for tensor in (self.trainer.weight, self.trainer.state)]

        def prepare(self, sequences: Sequence[TrainSequence], loss: LossSettings) -> None:
            rehearsal.here.work("prepare", "trainer weights")
            rehearsal.here.use_for_a_while("trainer activations")

        def update_jointly(self, batches: Sequence[Batch], *, last: bool = True) -> UpdateStats:
            parts = (f"{part}{self.trainer.suffix}" for part in ("trainer weights", "optimizer", "gradients"))
            rehearsal.here.work("update", *parts)
            rehearsal.here.use_for_a_while("trainer activations")
            if rehearsal.gap:
                raise LogprobGapError("trainer and engine differ")
            assert self.trainer.version() == self.num_updates, "weights or optimizer are of another time"
            self.num_updates += 1
            rehearsal.here.num_updates = self.num_updates
            with torch.no_grad():
                self.trainer.weight += 1
                self.trainer.state += 1
            return UpdateStats(0.5, 1.0, 0.0, 1.0, 0.0, 0.0, 4, 2, 1e-5, False)

        def update_sft(self, sequences: Sequence[TrainSequence]) -> UpdateStats:
            return self.update_jointly([Batch(sequences, LossSettings())])

        def evaluate_sft(self, sequences: Sequence[TrainSequence]) -> float:
            rehearsal.here.work("evaluate", f"trainer weights{self.trainer.suffix}")
            return 1.0

        def export_hf(self, out_dir: Path) -> None:
            rehearsal.here.work("export", f"trainer weights{self.trainer.suffix}")
            if rehearsal.here.rank == 0:
                (out_dir / "config.json").write_text('{"model_type": "qwen2"}')

    class Save:
        def __init__(self, policy: StandInPolicy, folder: Path, *, background: bool) -> None:
            rehearsal.here.work("save")
            values = {number for tensor in policy.where_all_is() for number in tensor.tolist()}
            assert values == {policy.num_updates}, "weights or optimizer are of another time"
            if rehearsal.here.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "state").write_text(json.dumps(policy.num_updates))
            rehearsal.here.gather(None)

        def is_written(self) -> bool:
            return True

        def finish(self) -> dict[str, Any]:
            rehearsal.here.gather(None)
            return {}

    def load(policy: StandInPolicy, folder: Path) -> None:
        rehearsal.here.work("load")
        rehearsal.here.use_for_a_while("trainer activations")
        rehearsal.here.num_updates = policy.num_updates = number = json.loads((folder / "state").read_text())
        with torch.no_grad():
            for tensor in policy.where_all_is():
                tensor.fill_(number)

    class StandInSync:
        """Brings the trainer's number to the engine."""

        def __init__(self, policy: StandInPolicy, engine: Any, _config: Any) -> None:
            self.policy, self.engine = policy, engine
            rehearsal.here.work("connect")
            rehearsal.here.use_for_a_while("sync buffers")

        def sync(self) -> SyncStats:
            rehearsal.here.work("sync", "trainer weights", "engine weights")
            rehearsal.here.use_for_a_while("sync buffers")
            self.engine.llm.version = int(self.policy.trainer.weight[0])
            self.engine.reset_prefix_cache()
            return SyncStats(1, 1, 1)

        def find_mismatches(self) -> list[str]:
            rehearsal.here.work("compare", "trainer weights", "engine weights")
            return []

    def make_engine(settings: Any, config: Config, name: str, *, load_weights: bool) -> RolloutEngine:
        engine = RolloutEngine.__new__(RolloutEngine)
        engine.world_size, engine.rank = RANKS, rehearsal.here.rank
        engine.tensor_size, engine.tensor_rank = 1, 0
        engine.num_groups, engine.group = RANKS, engine.rank
        engine.device, engine.dtype = torch.device("cuda"), torch.bfloat16
        engine._awake = ("weights", "kv_cache")
        engine.forgets_when_asleep = not load_weights
        engine.llm = StandInLLM(rehearsal.here)
        rehearsal.here.work("load the engine", "engine weights", "kv cache")
        return engine

    def complete(
        engine: RolloutEngine, requests: list[Any], _sampling: Any, tell: Callable[[int, int], None]
    ) -> list[Generation]:
        process = rehearsal.here
        process.work("generate", "engine weights", "kv cache", together=False)
        process.note("generate", versions=(engine.llm.version, process.num_updates))
        process.use_for_a_while("engine activations")
        for done in range(1, len(requests) + 1):
            tell(done, len(requests))
        return [Generation([5, 6], [-1.0, -1.0], "length") for _ in requests]

    def all_gather_object(values: list[Any], value: Any) -> None:
        values[:] = rehearsal.here.gather(value, "generate", "engine weights", "kv cache")

    collecting = threading.Lock()

    def collect() -> None:
        """One rank after the other: Python collects nothing for a thread while it is collecting for another."""
        rehearsal.here.gather(None)
        with collecting:
            gc.collect()
        rehearsal.here.gather(None)

    world = SimpleNamespace(
        get_world_size=lambda: RANKS,
        get_rank=lambda: rehearsal.here.rank,
        barrier=lambda: rehearsal.here.gather(None),
        all_gather_object=all_gather_object,
    )
    for owner, name, stand_in in (
        (exchange_module, "dist", world),
        (exchange_module, "all_gather_objects", lambda value: rehearsal.here.gather(value)),
        (exchange_module, "any_rank", lambda flag: any(rehearsal.here.gather(flag))),
        (engine_module, "dist", world),
        (RolloutEngine, "_complete", complete),
        (model_worker, "Policy", StandInPolicy),
        (model_worker, "WeightSync", StandInSync),
        (model_worker, "make_engine", make_engine),
        (model_worker, "take_stream", lambda: rehearsal.here.work("take the stream")),
        *(
            (module, name, stand_in)
            for module in (model_worker, sft)
            for name, stand_in in (
                ("total_peak", lambda *_: 1e12),
                ("peak_memory_bytes", lambda _: 1),
                ("max_over_ranks", lambda values: values),
            )
        ),
        (sft, "Policy", StandInPolicy),
        (sft, "this_device", lambda: torch.device("cuda")),
        (sft, "dist", world),
        (sft, "gc", SimpleNamespace(collect=collect)),
        (saved_state, "Save", Save),
        (saved_state, "load", load),
        (host_memory, "on_gpu", lambda _: True),
        (torch.cuda, "synchronize", lambda: rehearsal.here.look_at_storages()),
        (torch.cuda, "empty_cache", lambda: rehearsal.here.empty_cache()),
    ):
        monkeypatch.setattr(owner, name, stand_in)


class StandInLLM:
    """vLLM's sleep mode: what lies in its own pool comes and goes at once, without PyTorch's allocator."""

    def __init__(self, process: Process) -> None:
        self.process, self.asleep = process, set[str]()
        self.version: int | None = 0  # of the weights: after how many updates; None where there is anything in them
        process.take(*PARTS_BY_TAG.values())

    def sleep(self, level: int) -> None:
        self.process.note("sleep", {PARTS_BY_TAG[tag] for tag in self.asleep})
        self.process.note("return", {PARTS_BY_TAG[tag] for tag in PARTS_BY_TAG.keys() - self.asleep})
        self.asleep = set(PARTS_BY_TAG)
        self.version = None if level == 2 else self.version

    def wake_up(self, tags: list[str]) -> None:
        self.process.note("wake", {PARTS_BY_TAG[tag] for tag in tags if tag not in self.asleep})
        self.process.take(*(PARTS_BY_TAG[tag] for tag in tags))
        self.asleep -= set(tags)

    def reset_prefix_cache(self) -> bool:
        return True
