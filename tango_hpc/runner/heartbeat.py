"""The heartbeat of a process: RUN/heartbeat/rank_NNNNN.ROLE.json, which the process rewrites as it advances."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from tango_hpc.base.files import read_json, write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker

HEARTBEAT_SECONDS = 2.0
RANKS_AT_FULL_PACE = 64
STALL_SECONDS = 6.0


@dataclass(frozen=True)
class Beat:
    """One heartbeat; the defaults are those of a process that has not written any."""

    host: str = ""
    pid: int | None = None
    phase: str = "starting"
    part: str = ""  # of the phase, as far as it is counted: "35 of 160 responses"
    progress: int = -1  # phases entered; processes that are equally far have entered as many
    number: int = 0  # of this heartbeat: it grows as long as the process lives
    reached_safe_point: bool = False
    stack: str = ""  # of the main thread, once it has not advanced for STALL_SECONDS
    in_collective: bool = False  # in a collective, or waiting for the other role
    waits_for_peers: bool = False  # in a collective, or its GPU is busy


RECORD = TypeAdapter(Beat)


def read_beat(directory: RunDirectory, worker: Worker) -> Beat:
    """Return the last heartbeat of `worker`; the default where the file is missing or damaged."""
    try:
        return RECORD.validate_python(read_json(directory.heartbeat_file(worker)))
    except ValidationError:
        return Beat()


def write_beat(directory: RunDirectory, worker: Worker, beat: Beat) -> None:
    """Replace the heartbeat of `worker`."""
    write_atomically(directory.heartbeat_file(worker), json.dumps(asdict(beat)), durable=False)


def is_loading(directory: RunDirectory) -> bool:
    """Return whether rank 0 has not come to its first safe point: there is nothing to save."""
    return not any(beat.reached_safe_point for beat in _beats_of_first_rank(directory))


def part_under_way(directory: RunDirectory, phase: str) -> str:
    """Return the part of `phase` that rank 0 has done, in words; "" where the phase is not counted or has ended."""
    beats = _beats_of_first_rank(directory)
    return next((beat.part for beat in beats if beat.phase == phase and beat.part), "")


def _beats_of_first_rank(directory: RunDirectory) -> Iterator[Beat]:
    for file in directory.heartbeats.glob(f"{Worker(0).stem}*.json"):
        yield read_beat(directory, Worker.from_stem(file.stem))


def seconds_since_beat(directory: RunDirectory, rank: int) -> float:
    """Return how long ago a process of `rank` wrote a heartbeat; infinite where none did.

    By the clock of the file server, as far as this user may write there; the clocks of its clients differ.
    """
    beats = [file.stat().st_mtime for file in directory.heartbeats.glob(f"{Worker(rank).stem}*.json")]
    if not beats:
        return math.inf
    try:
        with tempfile.NamedTemporaryFile(dir=directory.control, prefix=".clock-") as probe:
            now = os.stat(probe.name).st_mtime
    except OSError:
        now = time.time()
    return now - max(beats)


class PhaseBoard:
    """Shared memory in which a process notes its phase for its parent, which reads it after a SIGKILL too."""

    SIZE = 256

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, self.SIZE)

    def write(self, phase: str) -> None:
        """Note `phase`."""
        self._pages[:] = phase.encode()[: self.SIZE].ljust(self.SIZE, b"\0")

    def read(self) -> str:
        """Return the last phase; "" where there is none."""
        return self._pages[:].rstrip(b"\0").decode(errors="replace")


class Heart:
    """Writes this process's heartbeat from a thread of its own."""

    def __init__(self, directory: RunDirectory, worker: Worker, board: PhaseBoard | None = None) -> None:
        self.directory, self.worker, self._board = directory, worker, board
        self.phase, self.part = "starting", ""
        self.reached_safe_point = False
        # Returns whether this process's GPU has unfinished work. A collective on a GPU ends on the GPU, not in the call
        # that starts it: a process that waits for a peer stands wherever it next reads a number. The heartbeat's thread
        # calls this, so it must not touch the GPU while CUDA graphs are captured: that would invalidate them.
        self.gpu_is_busy: Callable[[], bool] = lambda: False
        self._progress = self._number = 0
        self._advanced_at = time.monotonic()
        self._main_thread = threading.main_thread().ident
        self._closed = threading.Event()
        self._phase_changed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, then one every few seconds and at every change of phase."""
        self._write()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._phase_changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def enter(self, phase: str) -> None:
        """Note that this process advanced and is now in `phase`. No collective; call it as often as you like."""
        changed = phase != self.phase
        self.phase = phase
        if self._board is not None:
            self._board.write(phase)
        self._progress += 1
        self.advance("")
        if changed:
            self._phase_changed.set()

    def advance(self, part: str) -> None:
        """Note that this process advanced within its phase, of which `part` is done. As cheap as `enter`."""
        self.part = part
        self._advanced_at = time.monotonic()

    def _beat(self) -> None:
        # Many ranks beat more slowly together: their files lie on one file system.
        size = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
        seconds = HEARTBEAT_SECONDS * max(1.0, int(size) / RANKS_AT_FULL_PACE)
        while not self._closed.wait(seconds / 10):
            self._phase_changed.wait(seconds)
            self._phase_changed.clear()
            try:
                self._write()
            except OSError as error:  # a full disk must not end a process that may still be able to train
                with contextlib.suppress(OSError):  # the log is on the same disk
                    print(f"{self.worker}: cannot write its heartbeat: {error}", file=sys.stderr)

    def _write(self) -> None:
        stack = traceback.StackSummary()
        if time.monotonic() - self._advanced_at > STALL_SECONDS:
            stack = traceback.extract_stack(sys._current_frames().get(self._main_thread or 0))
        in_collective = any(_waits(entry) for entry in stack[-4:])
        self._number += 1
        beat = Beat(
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=self.phase,
            part=self.part,
            progress=self._progress,
            number=self._number,
            reached_safe_point=self.reached_safe_point,
            stack="".join(traceback.format_list(stack[-12:])),
            in_collective=in_collective,
            waits_for_peers=in_collective or (bool(stack) and self.gpu_is_busy()),
        )
        write_beat(self.directory, self.worker, beat)


def _waits(entry: traceback.FrameSummary) -> bool:
    """Return whether `entry`, near the end of a stack, is a wait for other processes.

    `await_work` is the exchange between roles. torch/distributed/checkpoint writes files; it waits in other modules.
    """
    in_collective = "torch/distributed" in entry.filename and "torch/distributed/checkpoint" not in entry.filename
    return in_collective or entry.name == "await_work"
