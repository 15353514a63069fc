"""Two ranks of a role as real processes under their task, one of which is lost: `python -m tests.helpers.dead_peer
SPEC.json`.

SPEC: `run` (directory), `where` ("sync", in a message of a weight sync; "update", in a collective of a trainer), `how`
("held", it does not answer; "killed") and `limit_seconds`. On GPUs where there are two, else over Gloo.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import RANKS_OF_TASK, Worker
from tango_hpc.models.layout.engine_layout import engine_layout
from tango_hpc.models.layout.trainer_layout import megatron_layout
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.ranks import init_distributed, is_busy
from tango_hpc.models.weight_sync.plan import Layouts, build_plan
from tango_hpc.models.weight_sync.transfer import Transfer
from tango_hpc.runner.environment import free_port, rank_variables
from tango_hpc.runner.heartbeat import read_beat
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.workers import Body, host_ranks

ROLE = "generator"
SHAPE = ModelShape("qwen2", 4, 32, 48, 4, 2, 8, 107, True)
HELD_SECONDS = 240.0


class Sink:
    """An engine's parameters, of which only the shapes count here."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self.params = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}

    def open(self, module_name: str) -> None:
        """Nothing to prepare."""

    def tensor(self, name: str) -> torch.Tensor:
        return self.params[name]

    def close(self, module_name: str) -> None:
        """Nothing to finish."""


def weight_sync(device: torch.device, limit_seconds: float) -> Any:
    """A trainer of tensor size 2 and an engine of size 1: each rank waits for half of the weights."""
    cut, rank = Layouts(SHAPE, 2, 2, 1, 1, 2), dist.get_rank()
    source, target = megatron_layout(SHAPE, 2, 1, rank, 0), engine_layout(SHAPE, 1, 0)
    plan = build_plan(cut, element_bytes=4, bucket_bytes=4096, rank=rank)
    assert plan.mine is not None
    group = PolicyGroups.create(2, 1).world
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects the ranks
    transfer = Transfer(
        plan.mine, source, target, dtype=torch.float32, device=device, group=group, timeout_seconds=limit_seconds
    )  # fmt: skip
    shards = {name: torch.zeros(param.shape, device=device) for name, param in source.items()}
    return lambda: transfer.run(shards, Sink({name: param.shape for name, param in target.items()}, device))


def update(device: torch.device) -> Any:
    """What tensor ranks do after each layer."""
    group, values = PolicyGroups.create(2, 1).tensor, torch.ones(1000, device=device)

    def collective() -> float:
        dist.all_reduce(values, group=group)
        return float(values.sum())  # waits for the GPU

    collective()  # connects the ranks
    return collective


def wait_until(true: Callable[[], bool]) -> None:
    """Do nothing else meanwhile."""
    give_up = time.monotonic() + HELD_SECONDS
    while not true() and time.monotonic() < give_up:
        time.sleep(0.1)


def ended_after_beats(directory: RunDirectory) -> bool:
    """Whether rank 0 has ended. What heartbeats say of who waits, once both ranks stall, goes to the file `waits`."""
    beats, file = [read_beat(directory, Worker(rank, ROLE)) for rank in (0, 1)], Path(directory.path, "waits")
    if all(beat.stack for beat in beats) and not file.exists():
        file.write_text(json.dumps([beat.waits_for_peers for beat in beats]))
    return directory.outcome_file(Worker(0, ROLE)).exists()


def lose_one(spec: dict[str, Any], directory: RunDirectory) -> tuple[Sequence[str], Body]:
    """Rank 1 is lost when both have met; rank 0 goes on without it."""

    def body(worker: Worker, process: RankProcess) -> None:
        os.environ.update(rank_variables(worker.rank))
        limit = spec["limit_seconds"]
        device = init_distributed(limit if spec["where"] == "update" else 2 * limit).device  # a sync gives up before
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())  # as an engine of several GPUs leaves it
            process.watch_stream = lambda: partial(is_busy, torch.cuda.current_stream(device))  # as stages/rank.py does
            process.has_loaded()
        step = update(device) if spec["where"] == "update" else weight_sync(device, limit)
        process.heart.enter("train" if spec["where"] == "update" else "weight sync")
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        if worker.rank == 0:
            Path(directory.path, "started").write_text(str(time.time()))
            step()
        elif spec["how"] == "killed":
            wait_until(lambda: read_beat(directory, worker).phase == process.heart.phase)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            wait_until(lambda: ended_after_beats(directory))

    return [ROLE], body


def main() -> int:
    """Be the task of both ranks."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", NODE_RANK="0")
    os.environ.update({RANKS_OF_TASK: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    directory = RunDirectory(spec["run"])
    return host_ranks(directory, lambda: lose_one(spec, directory))


if __name__ == "__main__":
    sys.exit(main())
