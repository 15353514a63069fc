"""A grading process: reads one JSON request a line from stdin, writes one JSON verdict a line to stdout.

Started by `pool.GradingPool` as a fresh interpreter, so it holds no copy of the parent's models. It limits
itself: address space for memory, and a CPU-time alarm for each request whose signal ends the process even
inside one long multiplication. CPU time and not wall time, so a busy machine does not change verdicts.

Request: {"rule", "gold", "answer", "options"}. Verdict: {"correct", "outcome"}, with "error" or "labels" where there are any.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys


def main(time_limit_seconds: float, memory_limit_bytes: int) -> None:
    """Answer requests until stdin closes. The first line written says that the process is ready."""
    from tango_hpc.errors import UserError
    from tango_hpc.grading import mathematics
    from tango_hpc.grading.rules import RULES

    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Ctrl-C is for the parent, whose end closes our stdin; so is what Slurm sends to every process of a step.
    # Handlers, as what is ignored would be so in the programs that a task of the user's starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    mathematics.same_answer(r"\frac{x^2}{2}", r"x^2 \cdot \frac{1}{2}")  # loads what parsing loads on first use
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=verdicts)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, time_limit_seconds)
        try:
            result = RULES[request["rule"]](request["gold"], request["answer"], **request["options"])
            verdict: dict[str, object] = {"outcome": "graded"}
            verdict |= {"labels": result} if request["rule"] == "own_steps" else {"correct": bool(result)}
        except MemoryError:
            verdict = {"correct": False, "outcome": "memory"}
        except UserError as error:  # a mistake in a user's own task, with its place
            verdict = {"correct": False, "outcome": "error", "error": str(error)}
        except Exception as error:  # whatever a hostile answer breaks inside sympy makes that answer wrong, no more
            verdict = {"correct": False, "outcome": "error", "error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=verdicts)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
