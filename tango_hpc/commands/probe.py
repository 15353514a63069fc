"""The program that `tango doctor` runs on every rank of an allocation: `python -m tango_hpc.commands.probe FOLDER
PROCESSES`.

Each rank writes FOLDER/probe_RANK.json. torch is imported inside, so that a broken one is a finding and not a crash. A
rank that NCCL ends, or that hangs, has written before which all-reduce it began.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner.environment import interfaces, prepare_rank
from tango_hpc.runner.gpu_driver import why_no_gpu, why_not_shared
from tango_hpc.runner.gpu_environment import prepare_gpu_environment
from tango_hpc.runner.staging import VARIABLE as STAGE_WEIGHTS_TO

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

TIMEOUT_SECONDS = 60.0
PAIR_TIMEOUT_SECONDS = 30.0  # less, so that the other ranks still wait when a pair fails
ALL_REDUCE_MB = 64


def probe(directory: RunDirectory, num_processes: int) -> None:
    """Write the findings of this rank, whose GPU `num_processes` are to use.

    An `error` stands for all that could not be found after it.
    """
    scratch = Path(os.environ.get(STAGE_WEIGHTS_TO) or tempfile.gettempdir())
    existing = next(folder for folder in (scratch, *scratch.parents) if folder.is_dir())
    found: dict[str, Any] = {
        "rank": int(os.environ["RANK"]),
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "host": socket.gethostname(),
        "scratch": str(scratch),
        "scratch_free_gb": shutil.disk_usage(existing).free / 2**30,
        "interfaces": interfaces(),
        "own_address": _own_address(),
        "gpu_refuses": why_not_shared(num_processes),
    }

    def write(**more: Any) -> None:
        write_atomically(directory.path / f"probe_{found['rank']:05d}.json", json.dumps(found | more))

    try:
        _all_reduces(found, begin=lambda what: write(error=f"no answer from {what}"))
    except Exception as error:  # whatever it is, it is a finding
        found["error"] = f"{type(error).__name__}: {error}"
    write()


def _all_reduces(found: dict[str, Any], begin: Callable[[str], None]) -> None:
    """All-reduce between two ranks of each node, then over all ranks; `begin` is called before each of them.

    Where a node fails, no rank starts the second one: the error would hide which two GPUs do not reach each other.
    """
    import torch

    from tango_hpc.models.parallel.collectives import all_gather_objects
    from tango_hpc.models.parallel.ranks import init_distributed, sees_one_gpu, shutdown_distributed

    info = init_distributed(TIMEOUT_SECONDS)
    on_gpu = info.device.type == "cuda"
    found |= {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "backend": "NCCL" if on_gpu else "Gloo",
        "torch": torch.__version__,
        "no_gpu": "" if on_gpu else why_no_gpu(),
        "sees_one_gpu": on_gpu and sees_one_gpu(torch.cuda.device_count()),
    }
    pair, group = _pair_of_node(all_gather_objects(found["node"]), found["rank"])
    if group is not None:
        found["pair"] = pair
        what = f"the all-reduce between ranks {pair[0]} and {pair[1]}"
        begin(what)
        try:
            found["pair_seconds"], found["pair_right"], _ = _all_reduce(info.device, group)
        except Exception as error:  # of NCCL, CUDA or Gloo; the other nodes must hear of it
            found["error"] = f"{what} failed: {type(error).__name__}: {error}"
    if any(all_gather_objects("error" in found)):
        return
    begin("the all-reduce over all ranks")
    found["all_reduce_seconds"], found["all_reduce_right"], found["clock"] = _all_reduce(info.device, None)
    shutdown_distributed()


def _pair_of_node(nodes: Sequence[str], rank: int) -> tuple[list[int], ProcessGroup | None]:
    """Return the first two ranks of this rank's node, and their group where this rank is one of them. Collective.

    `nodes` has the node of every rank. A node with a single rank has no pair.
    """
    import torch.distributed as dist

    own, joined = [], None
    for node in dict.fromkeys(nodes):
        pair = [other for other, name in enumerate(nodes) if name == node][:2]
        if len(pair) == 2:
            group = dist.new_group(pair, timeout=timedelta(seconds=PAIR_TIMEOUT_SECONDS))
            if rank in pair:
                own, joined = pair, group
    return own, joined


def _all_reduce(device: torch.device, group: ProcessGroup | None) -> tuple[float, bool, float]:
    """Return the seconds of an all-reduce, whether its sums are right, and the time at which it began."""
    import torch
    import torch.distributed as dist

    numbers = torch.ones(ALL_REDUCE_MB * 2**18, device=device)
    dist.all_reduce(numbers, group=group)  # connects
    dist.barrier(group)
    clock = time.time()  # right after a barrier all clocks should agree
    start = time.perf_counter()
    dist.all_reduce(numbers, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, bool((numbers == float(dist.get_world_size(group) ** 2)).all()), clock


def _own_address() -> str | None:
    """Return the address of this host's name, at which Gloo listens unless told otherwise."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def main() -> int:
    """Entry point."""
    directory = RunDirectory(sys.argv[1])
    try:
        os.environ.update(prepare_rank(directory))
    except UserError as error:
        print(f"tango: {error}", file=sys.stderr)
        return error.exit_code
    prepare_gpu_environment()  # as ranks do; the doctor tells what that changes
    probe(directory, int(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
