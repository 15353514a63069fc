"""Attempts at a run, one after the other, each stopped, killed or left alone at a place that is known beforehand.

`python -m tests.helpers.attempts SPEC.json` imports what is heavy once and then plays launcher: every attempt is a task
with all ranks, forked, whose processes are the real ones. How the tasks ended goes to SPEC.ended.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tango_hpc.base.config import config_to_yaml, load_config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.base.run.worker import RANKS_OF_TASK, Worker
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.environment import free_port
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.workers import Body, host_ranks
from tango_hpc.stages.rank import prepare_stage


@dataclass(frozen=True)
class Attempt:
    """One start of a stage of RUN. `stop`: (phase, n), told to stop at the n-th safe point before `phase`.

    `kill`: (rank, role, phase, n), that process kills itself when it enters `phase` for the n-th time. `forgetful`:
    engines lose their weights whenever they sleep, as on a GPU. `flips`: before it starts, one bit of that file of the
    newest checkpoint is flipped. `settings`: those of the run that are others from then on.
    """

    run: str
    stage: str = "train"
    stop: tuple[str, int] | None = None
    kill: tuple[int, str, str, int] | None = None
    forgetful: bool = False
    flips: str | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a task ended: its exit code, and the names (`ps -o comm`) of the processes that it had at once."""

    code: int
    processes: list[str]


def make_attempts(folder: Path, attempts: list[Attempt], timeout: float = 600) -> list[Ended]:
    """How each attempt ended."""
    spec = folder / "spec.json"
    spec.write_text(json.dumps([asdict(attempt) for attempt in attempts]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-P", "-m", "tests.helpers.attempts", str(spec)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [Ended(**values) for values in json.loads(spec.with_suffix(".ended.json").read_text())]


def interrupted(body: Body, attempt: Attempt) -> Body:
    """`body` with what happens to it."""

    def interrupt(worker: Worker, process: RankProcess) -> None:
        check, enter, seen = process.check, process.heart.enter, {"stop": 0, "kill": 0}

        def checked(phase: str) -> bool:
            if attempt.stop is not None and phase == attempt.stop[0]:
                seen["stop"] += 1
                if seen["stop"] == attempt.stop[1] and worker.rank == int(os.environ["WORLD_SIZE"]) - 1:
                    process.stop.receive(signal.SIGTERM)  # one process hears of it, all stop
            return check(phase)

        def entered(phase: str) -> None:
            enter(phase)
            if attempt.kill is not None and [*worker, phase] == list(attempt.kill[:3]):
                seen["kill"] += 1
                if seen["kill"] == attempt.kill[3]:
                    os.kill(os.getpid(), signal.SIGKILL)

        process.check, process.heart.enter = checked, entered  # type: ignore[method-assign]
        body(worker, process)

    return interrupt


def forget_in_sleep() -> None:
    """What a GPU does to a sleeping engine whose weights are not kept, here by other weights."""
    from tango_hpc.models.engine import engine

    engine.FORGETFUL_DEVICES = ("cuda", "cpu")

    def sleep(self: engine.RolloutEngine) -> None:
        if self.forgets_when_asleep:
            noise = hf_noise(self)
            self.reload(noise)

    engine.RolloutEngine.sleep = sleep  # type: ignore[method-assign]


def hf_noise(engine: Any) -> Any:
    """Every tensor of the engine's model, of the shape that a checkpoint gives it, with nonsense in it."""
    import torch

    from tango_hpc.base.model_shape import ModelShape, hf_tensors
    from tango_hpc.models.trainer.hf_io import read_config

    shape = ModelShape.from_hf_config(read_config(engine.model_dir))
    for name, size in hf_tensors(shape).items():
        yield name, torch.full(size, 3.0, dtype=engine.dtype)


def play(attempt: Attempt) -> int:
    """Be the task of one attempt."""
    directory = RunDirectory(attempt.run)
    if attempt.settings:
        changed = config_to_yaml(load_config(directory.config, attempt.settings))
        enter_run(directory.path, changed, resume=True, stage=attempt.stage)
    size = str(load_config(directory.config).world_size)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, NODE_RANK="0")
    os.environ.update({RANKS_OF_TASK: size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    if attempt.forgetful:
        forget_in_sleep()

    def prepare() -> tuple[Any, Body]:
        roles, body = prepare_stage(directory, attempt.stage)
        return roles, interrupted(body, attempt)

    return host_ranks(directory, prepare)


def main() -> None:
    """Entry point."""
    spec = Path(sys.argv[1])
    attempts = [Attempt(**values) for values in json.loads(spec.read_text())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for stage in {attempt.stage for attempt in attempts}:  # imported once for all
        prepare_stage(RunDirectory(attempts[0].run), stage)
    ended = []
    for attempt in attempts:
        if attempt.flips is not None:
            flip(steps_in(RunDirectory(attempt.run).checkpoints / attempt.stage)[-1][1] / attempt.flips)
        result = multiprocessing.get_context("fork").SimpleQueue()
        task = multiprocessing.get_context("fork").Process(
            target=lambda attempt=attempt, result=result: result.put(play(attempt))
        )
        task.start()
        processes: list[str] = []
        while task.exitcode is None:
            task.join(0.1)
            assert task.pid is not None
            present = children(task.pid)
            processes = present if len(present) >= len(processes) else processes  # a new one has no name of its own yet
        ended.append(Ended(result.get() if task.exitcode == 0 else -1, processes))
    spec.with_suffix(".ended.json").write_text(json.dumps([asdict(entry) for entry in ended]))


def flip(file: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def children(pid: int) -> list[str]:
    """The names of the processes that `pid` has started, as `ps` has them."""
    listed = subprocess.run(["ps", "-o", "comm=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return sorted(listed.stdout.split())


if __name__ == "__main__":
    main()
