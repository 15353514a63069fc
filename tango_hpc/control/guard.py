"""Around everything that a rank does: it leaves word of how it ended, and does not outlive its supervisor.

The one rule of a rank's exit code: under a supervisor it is 0 as soon as the outcome is written, whatever that says,
since srun kills the other tasks of a step at the first other code, in the middle of their saving; the supervisor takes
the code from the outcome. Without a supervisor (`srun tango train`) it is the outcome's code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable

from tango_hpc.control.outcome import outcome_of, write_outcome
from tango_hpc.control.stop import StopSignal
from tango_hpc.run.directory import RunDirectory

# Set by the supervisor to its process id, or to "srun" where it is not the parent.
SUPERVISED = "TANGO_SUPERVISED"


def run_guarded(directory: RunDirectory, rank: int, body: Callable[[StopSignal], None]) -> int:
    """Run `body`, leave an outcome, return the process's exit code.

    Codes of an outcome: 0 done, 85 saved and resumable, the `exit_code` of our own errors, 1 otherwise.
    """
    die_with_parent()
    directory.outcomes.mkdir(exist_ok=True)
    directory.heartbeats.mkdir(exist_ok=True)
    crash_file = directory.crash_file(rank)
    stop = StopSignal(directory, rank)
    ended_by: BaseException | None = None
    with crash_file.open("w") as crash:
        faulthandler.enable(crash)  # a segmentation fault leaves its Python stacks there
        try:
            stop.start()
            body(stop)
        except BaseException as error:
            ended_by = error
        finally:
            stop.close()
            faulthandler.enable()
    crash_file.unlink()
    outcome = outcome_of(rank, stop.phase, ended_by)
    if outcome.failed:
        traceback.print_exception(ended_by)
    write_outcome(directory, outcome)
    return 0 if SUPERVISED in os.environ else outcome.code


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that a killed supervisor leaves no orphans (Linux)."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        supervisor = os.environ.get(SUPERVISED, "")
        if supervisor.isdigit() and os.getppid() != int(supervisor):
            os._exit(1)  # it died before the line above
