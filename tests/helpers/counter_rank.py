"""A rank that counts instead of training: the launch protocol without models.

`python -m tests.helpers.counter_rank RUN STAGE` adds 1 per step, in step with all ranks, and saves its counter as
training does. RUN.behaviour.json says how: "steps", "step_seconds", "load_seconds", "save_every", "results" for the
summary, "saves": false for checkpoints that never come, "gloo": true for torch.distributed in place of plain sockets,
which start faster. And what goes wrong: "rank", "step" and "action", which is "fail", "kill", "hang", "crash" or
"check"; "once": true for the first attempt only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener

import tango_hpc
from tango_hpc.control.guard import run_guarded
from tango_hpc.control.stop import StopSignal
from tango_hpc.errors import CheckFailed, StoppedEarly
from tango_hpc.files import write_atomically
from tango_hpc.launch.environment import own_rank, prepare_rank
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.summary import update_summary

RANK_COMMAND = (sys.executable, "-P", "-m", "tests.helpers.counter_rank")


def count(directory: RunDirectory, stage: str, stop: StopSignal) -> None:
    """Counts to behaviour["steps"], in step with all other ranks."""
    os.environ.update(prepare_rank(directory))
    behaviour = json.loads(directory.path.with_name(f"{directory.path.name}.behaviour.json").read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    any_rank = join_over_gloo() if behaviour.get("gloo") else join_over_sockets(rank, world_size)
    stop.agree = any_rank
    saved = sorted((directory.checkpoints / stage).glob("step_*"))
    step = first = json.loads(saved[-1].read_text())["step"] if saved else 0
    if rank == 0:
        update_summary(directory, stage, "running")

    def save() -> None:
        if rank == 0 and behaviour.get("saves", True):
            (directory.checkpoints / stage).mkdir(exist_ok=True)
            write_atomically(directory.checkpoints / stage / f"step_{step:06d}", json.dumps({"step": step}))
        any_rank(False)

    time.sleep(behaviour.get("load_seconds", 0))
    print(f"rank {rank} of {world_size} runs {tango_hpc.__file__}", flush=True)
    while step < behaviour["steps"]:
        if stop.check("rollout"):
            save()
            if rank == 0:
                update_summary(directory, stage, "stopped", steps=step)
            raise StoppedEarly
        if (rank, step) == (behaviour.get("rank"), behaviour.get("step")) and not (behaviour.get("once") and first):
            misbehave(behaviour["action"])
        time.sleep(behaviour.get("step_seconds", 0.1))
        any_rank(False)
        step += 1
        print(f"rank {rank} step {step}", flush=True)
        if behaviour.get("save_every") and step % behaviour["save_every"] == 0:
            save()
    save()
    if rank == 0:
        update_summary(directory, stage, "done", steps=step, results=behaviour.get("results"))


def join_over_gloo() -> Callable[[bool], bool]:
    """The product's own process group and agreement."""
    from tango_hpc.parallel.collectives import any_rank
    from tango_hpc.parallel.ranks import init_distributed

    init_distributed(60)
    return any_rank


def join_over_sockets(rank: int, world_size: int) -> Callable[[bool], bool]:
    """The same through rank 0, without torch."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    peers: list[Connection] = []
    if rank == 0:
        with Listener(address) as listener:
            peers = [listener.accept() for _ in range(world_size - 1)]
    else:
        while not peers:
            try:
                peers = [Client(address)]
            except ConnectionRefusedError:
                time.sleep(0.05)

    def any_rank(flag: bool) -> bool:
        try:
            if rank == 0:
                flag = any([flag, *(peer.recv() for peer in peers)])
            for peer in peers:
                peer.send(flag)
            return flag if rank == 0 else peers[0].recv()
        except EOFError:
            raise ConnectionResetError("connection closed by peer") from None

    return any_rank


def misbehave(action: str) -> None:
    """Whatever happens to ranks."""
    if action == "fail":
        raise ValueError("the loss went for a walk")
    if action == "check":
        raise CheckFailed("the data set has no column 'question'")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        time.sleep(600)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def counted(directory: RunDirectory, stage: str = "train") -> int:
    """The counter in the newest checkpoint."""
    return json.loads(max((directory.checkpoints / stage).glob("step_*")).read_text())["step"]


def main() -> int:
    """Entry point."""
    path, stage = sys.argv[1:]
    directory = RunDirectory.open(path)
    return run_guarded(directory, own_rank(), lambda stop: count(directory, stage, stop))


if __name__ == "__main__":
    sys.exit(main())
