"""Around everything that a process of a rank does: it leaves word of how it ended, and does not outlive its parent."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable

from tango_hpc.runner.outcome import outcome_of, reserve_outcome, write_outcome
from tango_hpc.runner.process import RankProcess

# Set by the supervisor to its process id, or to "srun" or "wrapped" where it is not, or may not be, the parent.
SUPERVISED = "TANGO_SUPERVISED"


def run_guarded(process: RankProcess, body: Callable[[RankProcess], None]) -> None:
    """Run `body` under the heartbeat of `process` and leave an outcome, whatever happens.

    Codes of an outcome: 0 done, 85 saved and resumable, the `exit_code` of our own errors, 1 otherwise.
    """
    crash_file = process.directory.crash_file(process.worker)
    ended_by: BaseException | None = None
    try:
        with crash_file.open("w") as crash:
            faulthandler.enable(crash)  # a segmentation fault leaves its Python stacks there
            try:
                reserve_outcome(process.directory, process.worker)
                process.start()
                body(process)
            finally:
                process.heart.close()
                faulthandler.enable()
    except BaseException as error:
        ended_by = error
    with contextlib.suppress(OSError):  # on a disk that has become read-only it stays
        crash_file.unlink()
    outcome = outcome_of(process.worker, process.heart.phase, ended_by)
    write_outcome(process.directory, outcome)
    if outcome.failed:
        with contextlib.suppress(OSError):  # the log is on the same disk
            traceback.print_exception(ended_by)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent dies, so that a killed supervisor leaves no orphans (Linux).

    `parent` is who should be the parent, where that is known: it may have died before this was called.
    """
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)
