"""Run a function on several ranks over Gloo, as the tests' stand-in for a launcher."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def run_ranks(func: Callable[..., Any], world_size: int, *args: Any, timeout: float = 280) -> list[Any]:
    """Call the top-level function `func(*args)` on `world_size` ranks and return the results in rank order.

    Each rank is a fresh process with a launcher's environment and an initialised process group. The first
    failure, by time, is raised here with its rank and traceback; after `timeout` seconds all ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_rank_main, args=(func, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        timed_out = False
        while any(process.is_alive() for process in processes):
            if any(process.exitcode not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + 10)  # for what the others say of it; a busy machine is slow
            if time.monotonic() > deadline:
                timed_out = True
                for process in processes:
                    process.kill()
                break
            time.sleep(0.02)
        for process in processes:
            process.join()
        failures = sorted(Path(folder).glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError(f"{failures[0].name}\n{failures[0].read_text()}")
        if timed_out:
            raise AssertionError(f"ranks did not finish within {timeout} s")
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world_size, f"exit codes {codes}"
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank_main(func: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    """Set the launcher's environment, join the process group, leave a result or a failure file."""
    from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    try:
        import torch

        torch.set_num_threads(1)
        _rendezvous(rank, folder)
        init_distributed(timeout_seconds=60)
        result = func(*args)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        shutdown_distributed()
    except BaseException:
        Path(folder, f"failure-of-rank-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _rendezvous(rank: int, folder: str) -> None:
    """Rank 0 picks a free port and leaves it in the folder for the others."""
    import socket

    port_file = Path(folder, "port")
    if rank == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        temporary = port_file.with_suffix(".tmp")
        temporary.write_text(str(port))
        temporary.rename(port_file)
    while not port_file.exists():
        time.sleep(0.01)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port_file.read_text())
