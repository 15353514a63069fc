"""A task whose processes count instead of training: the launch protocol without models.

`python -m tests.helpers.counter_rank RUN STAGE` has each process add 1 per step, in step with all others, and saves the
counter as training does. RUN.behaviour.json says how: "roles" (the generator alone), "steps", "step_seconds",
"load_seconds", "save_every", "results" for the summary, "saves": false for checkpoints that never come, "gloo": true
for torch.distributed in place of plain sockets, which start faster. And what goes wrong: "rank", "role" (the first),
"step" and "action", which is "fail", "kill", "hang", "crash", "check", "full" (the disk) or "write" (for 24 s, response
after response); "once": true for the first attempt only.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import tango_hpc
from tango_hpc.base.errors import CheckFailed, StoppedEarly
from tango_hpc.base.files import write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import update_summary
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.environment import rank_variables
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.workers import Body, host_ranks

RANK_COMMAND = (sys.executable, "-P", "-m", "tests.helpers.counter_rank")


def prepare(directory: RunDirectory, stage: str) -> tuple[list[str], Body]:
    """The roles, and what their processes do."""
    behaviour = json.loads(directory.path.with_name(f"{directory.path.name}.behaviour.json").read_text())
    roles = behaviour.get("roles", ["generator"])
    return roles, lambda worker, process: count(directory, stage, behaviour, roles, worker, process)


def count(
    directory: RunDirectory,
    stage: str,
    behaviour: dict[str, Any],
    roles: list[str],
    worker: Worker,
    process: RankProcess,
) -> None:
    """Counts to behaviour["steps"], in step with all other processes."""
    os.environ.update(rank_variables(worker.rank))
    rank, world_size = worker.rank, int(os.environ["WORLD_SIZE"])
    is_first = worker == (0, roles[0])
    if behaviour.get("gloo"):
        any_rank = join_over_gloo(worker, roles)
    else:
        any_rank = join_over_sockets(rank * len(roles) + roles.index(worker.role), world_size * len(roles))
    process.stop.agree = any_rank
    saved = sorted((directory.checkpoints / stage).glob("step_*"))
    step = first = json.loads(saved[-1].read_text())["step"] if saved else 0
    if is_first:
        update_summary(directory, stage, "running")

    def save() -> None:
        if is_first and behaviour.get("saves", True):
            (directory.checkpoints / stage).mkdir(exist_ok=True)
            write_atomically(directory.checkpoints / stage / f"step_{step:06d}", json.dumps({"step": step}))
        any_rank(False)

    time.sleep(behaviour.get("load_seconds", 0))
    print(f"rank {rank} of {world_size} runs {tango_hpc.__file__}", flush=True)
    while step < behaviour["steps"]:
        if process.check("rollout"):
            save()
            if is_first:
                update_summary(directory, stage, "stopped", steps=step)
            raise StoppedEarly
        wrong = Worker(behaviour.get("rank", -1), behaviour.get("role", roles[0]))
        if (worker, step) == (wrong, behaviour.get("step")) and not (behaviour.get("once") and first):
            misbehave(behaviour["action"], directory, process)
        time.sleep(behaviour.get("step_seconds", 0.1))
        any_rank(False)
        step += 1
        print(f"rank {rank} step {step}", flush=True)
        if behaviour.get("save_every") and step % behaviour["save_every"] == 0:
            save()
    save()
    if is_first:
        update_summary(directory, stage, "done", steps=step, results=behaviour.get("results"))


def join_over_gloo(worker: Worker, roles: list[str]) -> Callable[[bool], bool]:
    """The product's own process groups and agreement."""
    from torch.distributed import PrefixStore

    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.parallel.ranks import init_distributed, open_store

    store = open_store(60, hosts=worker == (0, roles[0]))
    init_distributed(60, PrefixStore(worker.role, store))
    return Exchange.join(store, roles, worker.role, 60).any


def join_over_sockets(number: int, size: int) -> Callable[[bool], bool]:
    """The same through the first process, without torch."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    peers: list[Connection] = []
    if number == 0:
        with Listener(address) as listener:
            peers = [listener.accept() for _ in range(size - 1)]
    else:
        while not peers:
            try:
                peers = [Client(address)]
            except ConnectionRefusedError:
                time.sleep(0.05)

    def any_rank(flag: bool) -> bool:
        try:
            if number == 0:
                flag = any([flag, *(peer.recv() for peer in peers)])
            for peer in peers:
                peer.send(flag)
            return flag if number == 0 else peers[0].recv()
        except EOFError:
            raise ConnectionResetError("connection closed by peer") from None

    return any_rank


def misbehave(action: str, directory: RunDirectory, process: RankProcess) -> None:
    """Whatever happens to ranks."""
    if action == "write":
        for done in range(1, 25):
            time.sleep(1)
            process.heart.advance(f"{done} of 24 responses")
    if action == "full":
        fill(directory.path)
        write_atomically(directory.rollout_file("generator", 2), bytes(2**20))
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


def fill(folder: Path) -> None:
    """Leave not a byte on the disk of `folder`."""
    for size in (2**16, 2**12, 1):
        try:
            with (folder / f"filling_{size}").open("wb", buffering=0) as file:
                while file.write(bytes(size)):
                    pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


def counted(directory: RunDirectory, stage: str = "train") -> int:
    """The counter in the newest checkpoint."""
    return json.loads(max((directory.checkpoints / stage).glob("step_*")).read_text())["step"]


def main() -> int:
    """Entry point."""
    path, stage = sys.argv[1:]
    directory = RunDirectory.open(path)
    return host_ranks(directory, lambda: prepare(directory, stage))


if __name__ == "__main__":
    sys.exit(main())
