"""A function on several ranks of this machine, in processes of their own. `python -m tools.bench.local_ranks` is one.

The function, named "module:function", is called on every rank with a folder; what rank 0 gets back is the result.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tango_hpc.runner.gpu_environment import prepare_gpu_environment

_TIMEOUT_SECONDS = 1200.0


def run_on_ranks(function: str, folder: Path, *, ranks: int, threads: int, device: str = "cpu") -> Any:
    """The result (JSON) of `function(folder)` on rank 0. RuntimeError where a rank fails; its error is on stderr."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # ranks take a GPU wherever they see one
    words = [sys.executable, "-P", "-m", "tools.bench.local_ranks", function, str(folder)]
    processes = [
        subprocess.Popen(words, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    await_all(processes)
    return json.loads((folder / "result.json").read_text())


def await_all(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait for all; the first to fail ends the others."""
    give_up = time.monotonic() + _TIMEOUT_SECONDS
    try:
        running = True
        while running:
            codes = [process.poll() for process in processes]
            failed = [number for number, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                raise RuntimeError(f"rank {failed[0]} of the benchmark failed; its error is above")
            if time.monotonic() > give_up:
                raise RuntimeError(f"the benchmark did not end within {_TIMEOUT_SECONDS:.0f} s")
            running = None in codes
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def rank_main(function: str, folder: Path) -> None:
    """One rank; rank 0 writes `result.json`."""
    prepare_gpu_environment()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed

    init_distributed(_TIMEOUT_SECONDS)
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(folder)
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(result))
    shutdown_distributed()


if __name__ == "__main__":
    rank_main(sys.argv[1], Path(sys.argv[2]))
