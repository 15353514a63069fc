"""A rank that counts instead of training: the launch protocol without models.

`python -m tests.helpers.counter_rank RUN STAGE` adds 1 on all ranks per step, and saves its counter as training does.
RUN/behaviour.json says what goes wrong, where and when: {"steps", "step_seconds", "rank", "step", "action"}, with
action "fail", "kill", "hang", "freeze", "crash" or "check"; "once": true for the first attempt only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from tango_hpc.errors import CheckFailed, StoppedEarly
from tango_hpc.launch.environment import prepare_rank
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.files import write_atomically
from tango_hpc.run.interrupt import StopSignal, run_guarded
from tango_hpc.run.summary import update_summary


def count(directory: RunDirectory, stage: str, stop: StopSignal) -> None:
    """Counts to behaviour["steps"], in step with all other ranks."""
    import torch
    import torch.distributed as dist

    from tango_hpc.parallel.ranks import init_distributed, shutdown_distributed

    behaviour = json.loads((directory.path / "behaviour.json").read_text())
    info = init_distributed(60)
    saved = directory.checkpoints / "counter.json"
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    first = step
    if info.rank == 0:
        update_summary(directory, stage, "running", begins=True)
    while step < behaviour["steps"]:
        if stop.check("rollout"):
            save(directory, step, info.rank)
            if info.rank == 0:
                update_summary(directory, stage, "stopped", steps=step)
            raise StoppedEarly
        due = info.rank == behaviour.get("rank") and step == behaviour.get("step")
        if due and not (behaviour.get("once") and first > 0):
            misbehave(behaviour["action"])
        time.sleep(behaviour.get("step_seconds", 0.1))
        one = torch.ones(1)
        dist.all_reduce(one)
        assert int(one) == info.world_size
        step += 1
        print(f"rank {info.rank} step {step}", flush=True)
        if behaviour.get("save_every") and step % behaviour["save_every"] == 0:
            save(directory, step, info.rank)
    save(directory, step, info.rank)
    if info.rank == 0:
        update_summary(directory, stage, "done", steps=step)
    shutdown_distributed()


def save(directory: RunDirectory, step: int, rank: int) -> None:
    """Rank 0 writes the counter; all wait for it."""
    import torch.distributed as dist

    if rank == 0:
        write_atomically(directory.checkpoints / "counter.json", json.dumps({"step": step}))
    dist.barrier()


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
    if action == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def main() -> int:
    """Entry point."""
    path, stage = sys.argv[1:]
    directory = RunDirectory.open(path)
    os.environ.update(prepare_rank(directory))
    return run_guarded(directory, int(os.environ["RANK"]), lambda stop: count(directory, stage, stop))


if __name__ == "__main__":
    sys.exit(main())
