"""What `tango doctor` runs on every rank of an allocation: `python -m tango_hpc.manage.probe FOLDER PROCESSES`.

Each rank writes FOLDER/probe_RANK.json. torch is imported inside, so that a broken one is a finding and not a crash.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tango_hpc.errors import UserError
from tango_hpc.files import write_atomically
from tango_hpc.launch.environment import interfaces, prepare_rank
from tango_hpc.launch.gpu_driver import why_no_gpu, why_not_shared
from tango_hpc.launch.gpu_environment import prepare_gpu_environment
from tango_hpc.launch.staging import VARIABLE as STAGE_WEIGHTS_TO
from tango_hpc.run.directory import RunDirectory

TIMEOUT_SECONDS = 60.0
ALL_REDUCE_MB = 64


def probe(directory: RunDirectory, num_processes: int) -> dict[str, Any]:
    """Findings of this rank, whose GPU `num_processes` are to use. An `error` stands for all that could not be found after it."""
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
    try:
        found |= _all_reduce()
    except Exception as error:  # whatever it is, it is a finding
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _all_reduce() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from tango_hpc.parallel.ranks import init_distributed, shutdown_distributed

    info = init_distributed(TIMEOUT_SECONDS)
    numbers = torch.ones(ALL_REDUCE_MB * 2**18, device=info.device)
    dist.all_reduce(numbers)  # connects
    dist.barrier()
    clock = time.time()  # right after a barrier all clocks should agree
    start = time.perf_counter()
    dist.all_reduce(numbers)
    if info.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    expected = float(info.world_size**2)
    found = {
        "clock": clock,
        "device": torch.cuda.get_device_name() if info.device.type == "cuda" else "CPU",
        "backend": "NCCL" if info.device.type == "cuda" else "Gloo",
        "all_reduce_seconds": seconds,
        "all_reduce_right": bool((numbers == expected).all()),
        "torch": torch.__version__,
        "no_gpu": why_no_gpu() if info.device.type == "cpu" else "",
    }
    shutdown_distributed()
    return found


def _own_address() -> str | None:
    """What this host's name resolves to, which is where Gloo listens unless told otherwise."""
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
    found = probe(directory, int(sys.argv[2]))
    write_atomically(directory.path / f"probe_{found['rank']:05d}.json", json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
