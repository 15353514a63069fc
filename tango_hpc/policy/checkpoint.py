"""A policy's whole state in Megatron-core's distributed checkpoint format: readable in any other layout.

Two departures from Megatron-core's way of writing. Each rank writes its files itself, in order, instead of
starting helper processes next to vLLM's threads. And a rank that cannot write (a full disk) goes on to the end of
the save with its peers, where all learn of it, instead of leaving them in a collective.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint.api import CheckpointException

from tango_hpc.parallel.collectives import all_gather_objects
from tango_hpc.parallel.megatron_cpu import megatron_on_cpu

if TYPE_CHECKING:
    from tango_hpc.policy.policy import Policy


def save(policy: Policy, folder: Path) -> None:
    """Write weights, optimizer, step and reference into `folder`. OSError, on all ranks, names what failed."""
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with megatron_on_cpu(), _writing_here(problems):
        try:
            dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(folder))
        except CheckpointException as error:
            problems += [f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
    everywhere = [problem for found in all_gather_objects(problems) for problem in found]
    if everywhere:
        raise OSError("; ".join(everywhere))


def load(policy: Policy, folder: Path) -> None:
    """Bring the policy to the state in `folder`, which any layout may have written."""
    with megatron_on_cpu():
        state = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(folder))
        policy.model.load_state_dict(state["model"], strict=False)
        if policy.optimizer is not None:
            policy.optimizer.load(state["optimizer"], state["step_count"])
        if policy.reference is not None:
            for name, tensor in policy.reference.items():
                tensor.copy_(state["reference"][name])


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    """Where each tensor of this rank lies in the whole; numbers are the same on all ranks."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": True,
        "dp_cp_group": policy.groups.data,
    }
    model = policy.model.sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model}
    if policy.optimizer is not None:
        state["optimizer"] = policy.optimizer.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        state["step_count"] = policy.optimizer.step_count
    if policy.reference is not None:
        names = {id(parameter): name for name, parameter in policy.named_shards().items()}
        state["reference"] = {
            names[id(entry.data)]: replace(
                entry, key=f"reference.{entry.key}", data=policy.reference[names[id(entry.data)]]
            )
            for entry in model.values()
            if id(entry.data) in names
        }
    return state


class _Writer(filesystem_async.FileSystemWriterAsync):
    """Writes its files one after the other in this process."""

    problems: list[str]

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[..., Any] | None, list[Any]]:
        if not self.write_buckets:
            return None, None, []
        self.results_queue: queue.Queue[Any] = queue.Queue()
        return self._write, lambda: self.preload_tensors(self.write_buckets, False), [0, self.write_buckets, None]

    def _write(self, _rank: int, buckets: list[Any], _queue: None) -> None:
        done: dict[int, Any] | Exception = {}
        transforms = [self.transforms] if hasattr(self, "transforms") else []
        for number, bucket in enumerate(buckets):
            results: queue.Queue[Any] = queue.Queue()
            count: queue.Queue[int] = queue.Queue()
            count.put(number)
            self.write_preloaded_data(transforms, number, bucket, results, count, use_fsync=True)
            result = results.get_nowait()[1]
            if isinstance(result, Exception):
                done = result
                break
            done[number] = result  # type: ignore[index]
        self.results_queue.put(done)

    def finish(self, metadata: Any, results: Any) -> None:
        with _remembering(self.problems):
            super().finish(metadata, results)


@contextlib.contextmanager
def _remembering(problems: list[str]) -> Iterator[None]:
    """Note a failure to write and go on."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        problems.append(f"rank {dist.get_rank()}: {error}")


@contextlib.contextmanager
def _writing_here(problems: list[str]) -> Iterator[None]:
    """Put our writer, and our handling of failures, in the place of Megatron-core's."""

    def tolerant(write: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            with _remembering(problems):
                write(*args, **kwargs)

        return run

    replacements = [
        (torch_strategy, "FileSystemWriterAsync", type("_Writer", (_Writer,), {"problems": problems})),
        (filesystem_async, "_get_write_results_queue", queue.Queue),
        (serialization, "save_config", tolerant(serialization.save_config)),
        (
            common_strategy.TorchCommonSaveStrategy,
            "save_common",
            tolerant(common_strategy.TorchCommonSaveStrategy.save_common),
        ),
    ]
    originals = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replacements, originals, strict=True):
            setattr(owner, name, value)
