"""How a rank hears that it must stop, shows that it advances, and leaves word of how it ended.

A rank learns of a stop in two ways: rank 0 sees the file `control/stop` that the supervisor or `tango stop` wrote, or
any rank received SIGTERM, SIGUSR2 or SIGINT (`scancel --signal` reaches the ranks, not the supervisor). Either way
the flag rides an all-reduce, so that every rank stops at the same safe point. Imports torch only for that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tango_hpc.errors import StoppedEarly
from tango_hpc.files import write_atomically
from tango_hpc.run.directory import RunDirectory

HEARTBEAT_SECONDS = 2.0
RANKS_AT_FULL_PACE = 64
STALL_SECONDS = 6.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)

# Set by the supervisor to its process id, or to "srun". Exit code 85 of one task would make srun kill the others, so a
# supervised rank that was stopped ends with 0 and tells what happened in its outcome file.
SUPERVISED = "TANGO_SUPERVISED"


class StopSignal:
    """Polled by the training loop at its safe points; writes this rank's heartbeat on the side.

    `agree` maps this rank's flag to "any rank's flag" and is a collective; by default the one over all ranks.
    """

    def __init__(self, directory: RunDirectory, rank: int, *, agree: Callable[[bool], bool] | None = None) -> None:
        self.directory = directory
        self.rank = rank
        self.stopping = False
        self._reached_safe_point = False
        self._agree = agree
        self._received: str | None = None
        self._phase = "starting"
        self._progress = 0
        self._advanced_at = time.monotonic()
        self._main_thread = threading.main_thread().ident
        self._closed = threading.Event()
        self._phase_changed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Install the signal handlers and start the heartbeat; call it before anything slow."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)
        self._write_heartbeat()
        self._heart.start()

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()
        self._phase_changed.set()
        if self._heart.is_alive():
            self._heart.join()

    @property
    def phase(self) -> str:
        """What this rank is doing."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Note that this rank advanced and is now in `phase`. No collective; call it as often as you like."""
        changed = phase != self._phase
        self._phase = phase
        self._progress += 1
        self._advanced_at = time.monotonic()
        if changed:
            self._phase_changed.set()

    def check(self, phase: str) -> bool:
        """Whether to save and stop now; every rank gets the same answer. A collective. `phase` is what comes next.

        Once it was True it stays True.
        """
        self._reached_safe_point = True
        self.enter(phase)
        if not self.stopping:
            asked = self._received is not None or (self.rank == 0 and self.directory.stop_file.exists())
            self.stopping = self._any_rank(asked)
        return self.stopping

    def _any_rank(self, flag: bool) -> bool:
        if self._agree is None:
            from tango_hpc.parallel.collectives import any_rank

            self._agree = any_rank
        return self._agree(flag)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name

    def _beat(self) -> None:
        # Many ranks beat more slowly together: their files lie on one file system.
        size = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or "1"
        seconds = HEARTBEAT_SECONDS * max(1.0, int(size) / RANKS_AT_FULL_PACE)
        while not self._closed.wait(seconds / 10):
            self._phase_changed.wait(seconds)
            self._phase_changed.clear()
            try:
                self._write_heartbeat()
            except OSError as error:  # a full disk must not end a rank that may still be able to train
                print(f"rank {self.rank}: cannot write its heartbeat: {error}", file=sys.stderr)

    def _write_heartbeat(self) -> None:
        stalled_seconds = time.monotonic() - self._advanced_at
        beat: dict[str, Any] = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": self._phase,
            "progress": self._progress,
            "reached_safe_point": self._reached_safe_point,
            "stalled_seconds": round(stalled_seconds, 1),
            "time": time.time(),
        }
        if stalled_seconds > STALL_SECONDS:
            frame = sys._current_frames().get(self._main_thread or 0)
            stack = traceback.extract_stack(frame)
            beat["stack"] = "".join(traceback.format_list(stack[-12:]))
            beat["waits_for_peers"] = any("torch/distributed" in entry.filename for entry in stack[-4:])
        write_atomically(self.directory.heartbeat_file(self.rank), json.dumps(beat), durable=False)


def run_guarded(directory: RunDirectory, rank: int, body: Callable[[StopSignal], None]) -> int:
    """Run `body`, leave an outcome file and, on failure, a failure file; returns the process's exit code.

    Codes: 0 done, 85 saved and resumable (0 under a supervisor), the `exit_code` of our own errors, 1 otherwise.
    """
    die_with_parent()
    directory.failures.mkdir(exist_ok=True)
    directory.heartbeats.mkdir(exist_ok=True)
    crash_file = directory.failure_file(rank).with_suffix(".crash")
    stop = StopSignal(directory, rank)
    with crash_file.open("w") as crash:
        faulthandler.enable(crash)  # a segmentation fault leaves its Python stacks there
        try:
            stop.start()
            body(stop)
            code = 0
        except StoppedEarly as stopped:
            code = stopped.exit_code
        except BaseException as error:
            code = getattr(error, "exit_code", 1)
            _write_failure(directory, rank, stop.phase, error, code)
            traceback.print_exc()
        finally:
            stop.close()
            faulthandler.enable()
    crash_file.unlink()
    write_atomically(outcome_file(directory, rank), json.dumps({"rank": rank, "code": code}))
    return 0 if code == StoppedEarly.exit_code and SUPERVISED in os.environ else code


def outcome_file(directory: RunDirectory, rank: int) -> Path:
    """How `rank` ended, written by itself as its last act; absent where it was killed."""
    return directory.heartbeats / f"rank_{rank:05d}.outcome"


def _write_failure(directory: RunDirectory, rank: int, phase: str, error: BaseException, code: int) -> None:
    failure = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "phase": phase,
        "error": f"{type(error).__name__}: {error}",
        "exit_code": code,
        "because_of_peer": _because_of_peer(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_atomically(directory.failure_file(rank), json.dumps(failure))


def _because_of_peer(error: BaseException) -> bool:
    """Whether the failure is an echo: a collective broke because another rank had gone."""
    names = ("DistBackendError", "DistNetworkError", "DistStoreError")
    if isinstance(error, ConnectionError) or type(error).__name__ in names:
        return True
    words = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "gloo")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that a killed supervisor leaves no orphans (Linux)."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        supervisor = os.environ.get(SUPERVISED, "")
        if supervisor.isdigit() and os.getppid() != int(supervisor):
            os._exit(1)  # it died before the line above
