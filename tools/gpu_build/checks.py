"""What a check is, and how its failure is told."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tango_hpc

SECONDS = 1800.0  # for all checks of a group; a machine that is busy is slow
Results = dict[str, str]  # by check: one of the three, or what moved
OK, NOT_HERE, NOT_REACHED = "ok", "-", "not reached"
HERE = Path(__file__).parent
PACKAGE = Path(tango_hpc.__file__).parent


class MovedError(Exception):
    """Something of another package is not what our code takes it for. The message names it."""


class NotReachedError(Exception):
    """A check needs what another one, which has failed, was to make."""


@dataclass(frozen=True)
class Check:
    """`run` raises where something moved. `used` says who relies on it; `cuda_build`: a CPU build has it not."""

    name: str
    used: str
    cuda_build: bool
    run: Callable[..., None]


def check(name: str, used: str, to: list[Check], cuda_build: bool = False) -> Callable[[Callable[..., None]], Any]:
    """Put a function into the list `to`."""

    def add(run: Callable[..., None]) -> Callable[..., None]:
        to.append(Check(name, used, cuda_build, run))
        return run

    return add


def expect(found: Any, wanted: Any, what: str) -> None:
    """Raise `MovedError` unless both are equal."""
    if found != wanted:
        raise MovedError(f"{what}: {found!r} where {wanted!r} was expected")


def perform(checks: Sequence[Check], *arguments: Any) -> Results:
    """Run the checks one after the other; a failure does not keep the others from running."""
    results: Results = {}
    for item in checks:
        if item.cuda_build and torch.version.cuda is None:
            results[item.name] = NOT_HERE
            continue
        try:
            item.run(*arguments)
            results[item.name] = OK
        except NotReachedError:
            results[item.name] = NOT_REACHED
        except Exception as error:
            results[item.name] = f"{told(error)} [used by {item.used}]"
    return results


def told(error: Exception) -> str:
    """The error in a line, and the lines on the way to it that are not a check's own."""
    text = " ".join(str(error).split())[:600]
    if isinstance(error, MovedError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != HERE]
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    if isinstance(error, AttributeError) and "'StandIn" in text:
        text = f"tools/gpu_build/stand_in_card.py does not know this release, mend it first: {text}"
    places = dict.fromkeys(f"{_short(frame.filename)}:{frame.lineno}" for frame in [*ours[-1:], *frames[-1:]])
    return f"{type(error).__name__}: {text}" + (f" (at {', then '.join(places)})" if places else "")


def _short(filename: str) -> str:
    """From the name of the package on."""
    _, found, inside = filename.rpartition("site-packages/")
    if not found and Path(filename).is_relative_to(PACKAGE.parent):
        return str(Path(filename).relative_to(PACKAGE.parent))
    return inside if found else "/".join(Path(filename).parts[-3:])


def on_ranks(group: Callable[[], Results], num_ranks: int) -> Results:
    """Run a group of checks in so many forked processes, which form a Gloo world; every rank must pass."""
    context = multiprocessing.get_context("fork")
    results: Results = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_be_rank, args=(group, rank, num_ranks, f"{folder}/store", sender))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            found: Results = {f"{group.__name__}, rank {rank}": f"no answer in {SECONDS:.0f} s"}
            if pipe.poll(SECONDS):
                try:
                    found = pipe.recv()
                except EOFError:
                    process.join()
                    found = {f"{group.__name__}, rank {rank}": f"the process ended with code {process.exitcode}"}
            for name, result in found.items():
                if results.get(name, OK) in (OK, NOT_HERE):
                    results[name] = result
        for process in processes:
            process.kill()
            process.join()
    return results


def _be_rank(group: Callable[[], Results], rank: int, num_ranks: int, store: str, sender: Any) -> None:
    """One process of a group."""
    import torch.distributed as dist

    from tango_hpc.models.parallel.ranks import init_distributed

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody meets there: the store is a file
    torch.set_num_threads(1)
    tempfile.tempdir = str(Path(store).parent)  # goes with the group, and what a broken engine leaves there
    try:
        init_distributed(timeout_seconds=SECONDS, store=dist.FileStore(store, num_ranks))
        sender.send(group())
    except Exception as error:
        sender.send({f"{group.__name__}, rank {rank}": told(error)})
    sender.close()
    os._exit(0)  # what libraries do at the end of a process is none of the checks
