"""The `tango` command with its ranks, forked from a process that has imported all of it; and a fault in one of them.

Everything is the real thing: the command, the supervisor, the task with its processes. Faults come from outside
(signals, files, mounts, limits of the system) at a moment that a wrapped call of one rank gives.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands import cli
from tango_hpc.runner import job
from tango_hpc.runner.guard import SUPERVISED, die_with_parent
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.program import Program
from tango_hpc.runner.starters import LocalStarter
from tango_hpc.runner.workers import Body, host_ranks
from tango_hpc.stages.rank import prepare_stage
from tests.faults.cells import DAMAGES, FAULT_TEXT, Cell
from tests.helpers.counter_rank import fill

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


class Forked:
    """A forked process, as `LocalStarter` asks for one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its return code, None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """The same, when it has ended."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork(be: Callable[[], int], output: Path) -> Forked:
    """A process that is `be`, ends with its code, and writes what it prints to the end of `output`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 1
    try:
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        code = be()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkStarter(LocalStarter):
    """A `LocalStarter` whose task is forked, and whose ranks meet `cell`."""

    def __init__(self, directory: RunDirectory, program: Program, config: Config, cell: Cell | None) -> None:
        super().__init__(directory, program, config)
        self._stage, self._cell = program.name, cell

    def _spawn(self, env: Mapping[str, str], writes: int) -> Any:
        def task() -> int:
            os.setpgid(0, 0)
            os.environ.update(env)
            return host_ranks(self._directory, self._prepare)

        return fork(task, self._directory.log_file(Worker(0)))

    def _prepare(self) -> tuple[Sequence[str], Body]:
        roles, body = prepare_stage(self._directory, self._stage)
        cell = self._cell

        def hit(worker: Worker, process: RankProcess) -> None:
            if cell is not None:
                arm(cell, worker, process)
            body(worker, process)

        return roles, hit


def start_command(directory: RunDirectory, cell: Cell | None, console: Path, temporary: Path) -> Forked:
    """`tango train RUN/config.yaml --resume` in a session of its own, which prints to `console`."""
    runner = os.getpid()

    def command() -> int:
        os.setsid()
        die_with_parent(runner)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        job._starter = lambda *where: ForkStarter(*where[:3], cell)  # type: ignore[assignment]
        sys.argv = ["tango", "train", str(directory.config), "--resume"]
        cli.main()
        return 0

    return fork(command, console)


def processes_of(session: int) -> Iterator[int]:
    """The processes of a session that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of_session) == session and state != "Z":
            yield int(stat.parent.name)


def arm(cell: Cell, worker: Worker, process: RankProcess) -> None:
    """Have the fault strike this process where the cell says."""
    if cell.phase == "save" and cell.fault in DAMAGES:
        if worker == (0, "generator"):
            damage_while_saving(cell, process)
        return
    point = cell.point
    if worker == point.worker:
        wrap(point.function, point.nth, lambda: process.heart.phase == point.phase, after=point.after)(
            lambda: strike(cell, process.directory)
        )


def wrap(function: str, nth: int, counts: Callable[[], bool], *, after: bool) -> Callable[[Callable[[], None]], None]:
    """Calls what it is given before or after the `nth` call that `counts` of the function MODULE:NAME."""
    module, _, path = function.partition(":")
    owner: Any = importlib.import_module(module)
    *folders, name = path.split(".")
    for folder in folders:
        owner = getattr(owner, folder)
    original = getattr(owner, name)
    seen = 0

    def install(act: Callable[[], None]) -> None:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += counts()
            now = counts() and seen == nth
            if now and not after:
                act()
            result = original(*args, **kwargs)
            if now and after:
                act()
            return result

        setattr(owner, name, wrapped)

    return install


def strike(cell: Cell, directory: RunDirectory) -> None:
    """What goes wrong."""
    if cell.fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif cell.fault == "SIGTERM":
        os.kill(int(os.environ[SUPERVISED]), signal.SIGTERM)  # as a cluster that preempts the job
    elif cell.fault == "SIGUSR2":
        os.killpg(os.getpgrp(), signal.SIGUSR2)  # as `scancel --signal`, which reaches all but the supervisor
    elif cell.fault == "exception":
        raise ValueError(FAULT_TEXT)
    elif cell.fault == "hang":
        time.sleep(3600)
    elif cell.fault == "disk full":
        fill(directory.path)
    elif cell.fault == "read-only directory":
        make_read_only(directory.path)
    elif cell.fault == "out of memory":
        use_up_memory()
    else:
        damage(cell.fault, steps_in(directory.checkpoints / "train")[-1][1], cell.point.damaged)
        if cell.phase != "loading":
            cut_power()


def damage_while_saving(cell: Cell, process: RankProcess) -> None:
    """Damages files between their writing and the checkpoint's name, in the process that gives it."""
    [folder] = [process.directory.checkpoints / "train"]
    point, saving = cell.point, lambda: process.heart.phase == cell.point.phase

    def act() -> None:
        (partial,) = folder.glob(".step_*")
        damage(cell.fault, partial, point.damaged)

    # When all files are on the disk, or when the manifest is.
    step = "write_manifest" if cell.fault == "missing manifest" else "_flush"
    wrap(f"tango_hpc.models.trainer.checkpoints:{step}", 1, saving, after=True)(act)
    if cell.fault != "truncated file":
        wrap("tango_hpc.models.trainer.checkpoints:Checkpoints.save", 1, lambda: True, after=True)(cut_power)


def damage(fault: str, checkpoint: Path, name: str) -> None:
    """One byte of a file of the checkpoint is another, its second half is missing, or the manifest is."""
    file = checkpoint / name
    if fault == "missing manifest":
        (checkpoint / "manifest.json").unlink()
    elif fault == "truncated file":
        os.truncate(file, file.stat().st_size // 2)
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)


def cut_power() -> None:
    """Nobody gets to say anything more."""
    os.kill(int(os.environ[SUPERVISED]), signal.SIGKILL)  # its children go with it
    time.sleep(3600)


def make_read_only(folder: Path) -> None:
    """Nothing below `folder` can be opened for writing, made or removed any more, by root neither."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    until = time.monotonic() + 10.0
    while subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=False).returncode:
        # Busy: since the first command somebody has opened a file there for writing. Below a write of torch's an
        # exception would be lost, and with it that nothing is wrong with the disk.
        if time.monotonic() > until:
            cut_power()
        time.sleep(0.01)


def use_up_memory() -> None:
    """The system gives this process no more than it has, and it asks for more."""
    import torch

    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present, resource.RLIM_INFINITY))
    taken = []
    while True:
        taken.append(torch.ones(16 * 2**20))
