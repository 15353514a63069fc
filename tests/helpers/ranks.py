"""Run a function on several ranks over Gloo, as the tests' stand-in for a launcher."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SERVER_START = threading.Lock()  # some tests start ranks from several threads


def run_ranks(
    func: Callable[..., Any], world_size: int, *args: Any, timeout: float = 560, preloaded: bool = True
) -> list[Any]:
    """Call the top-level function `func(*args)` on `world_size` ranks and return the results in rank order.

    Each rank is a new process with a launcher's environment and an initialised process group. The first failure, by
    time, is raised here with its rank and traceback; after `timeout` seconds all ranks are ended. Ranks begin with the
    imports of tests/helpers/preloaded.py, except on a GPU (CUDA does not survive a fork) and where `preloaded` is
    false.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = _context(preloaded and not os.environ.get("CUDA_VISIBLE_DEVICES"))
        processes = [
            context.Process(target=_rank_main, args=(func, rank, world_size, folder, dict(os.environ), args))
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
        for output in sorted(Path(folder).glob("output-of-rank-*")):
            print(output.read_text(errors="replace"), end="")
        failures = sorted(Path(folder).glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError(f"{failures[0].name}\n{failures[0].read_text()}")
        if timed_out:
            raise AssertionError(f"ranks did not finish within {timeout} s")
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world_size, f"exit codes {codes}"
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _context(preloaded: bool) -> multiprocessing.context.BaseContext:
    if not preloaded:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    # The server may start in a test's folder of decoys, and its threads would not survive a fork.
    with SERVER_START, _variables(PYTHONSAFEPATH="1", OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank_main(
    func: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    """Set the launcher's environment, join the process group, leave a result or a failure file."""
    output = os.open(Path(folder, f"output-of-rank-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    try:
        import torch

        from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed

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
