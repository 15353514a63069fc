"""A grading process: reads one JSON request a line from stdin, writes one JSON verdict a line to stdout.

Started by `pool.GradingPool` as a fresh interpreter, so it holds no copy of the parent's models. It limits
itself: address space for memory, and a CPU-time alarm for each request whose signal ends the process even
inside one long multiplication. CPU time and not wall time, so a busy machine does not change verdicts.

Request: {"rule", "gold", "answer", "options"}. Verdict: {"correct", "outcome"}, with "error" or "labels" where there
are any.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

# A request's limit of wall time in limits of CPU time: asleep, swapped out, or waiting for a program that a user's task
# has started. Others generate meanwhile.
WALL_FACTOR = 30


class _TooLong(BaseException):
    """Raised within a request at its limit of wall time: no `except Exception` of a task's keeps it."""


def main(time_limit_seconds: float, memory_limit_bytes: int) -> None:
    """Answer requests until stdin closes. The first line written says that the process is ready."""
    from tango_hpc.base.errors import UserError
    from tango_hpc.questions.grading import mathematics
    from tango_hpc.questions.grading.rules import RULES

    requests = os.fdopen(os.dup(0))
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what a task's program reads must not be the next requests
    os.close(nothing)
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _raise_too_long)
    # Ctrl-C is for the parent, whose end closes our stdin; so is what Slurm sends to every process of a step.
    # Handlers, as what is ignored would be so in the programs that a task of the user's starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    mathematics.same_answer(r"\frac{x^2}{2}", r"x^2 \cdot \frac{1}{2}")  # loads what parsing loads on first use
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=verdicts)
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, time_limit_seconds)
        # A little before the pool ends this process: `subprocess.run` then ends the program that it waits for.
        signal.setitimer(signal.ITIMER_REAL, 0.9 * WALL_FACTOR * time_limit_seconds)
        try:
            result = RULES[request["rule"]](request["gold"], request["answer"], **request["options"])
            verdict: dict[str, object] = {"outcome": "graded"}
            kind = request["rule"]
            verdict |= result if isinstance(result, dict) else {"labels" if kind == "own_steps" else "correct": result}
        except _TooLong:
            verdict = {"correct": False, "outcome": "time"}
        except MemoryError:
            verdict = {"correct": False, "outcome": "memory"}
        except UserError as error:  # a mistake in a user's own task, with its place
            verdict = {"correct": False, "outcome": "error", "error": str(error)}
        except Exception as error:  # whatever a hostile answer breaks inside sympy makes that answer wrong, no more
            verdict = {"correct": False, "outcome": "error", "error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=verdicts)


def _raise_too_long(*_: object) -> None:
    raise _TooLong


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
