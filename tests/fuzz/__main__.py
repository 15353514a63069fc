"""`python -m tests.fuzz [--runs N] [--guided] [TARGET ...]`: N inputs to each target, and what was counted.

By hypothesis; with `--guided` by atheris, which looks for inputs that reach new lines (tools/fuzz.sh installs it
aside).
"""

from __future__ import annotations

import argparse
import os
import sys
import time


def by_hypothesis(name: str, runs: int) -> None:
    """Random inputs; the smallest that fails is shown."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from tests.fuzz.targets import TARGETS

    settings(max_examples=runs, deadline=None, database=None, suppress_health_check=list(HealthCheck))(
        given(st.binary(max_size=400))(TARGETS[name])
    )()


def guided(name: str, runs: int) -> int:
    """In a child: libFuzzer ends the process. Its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    import atheris

    with atheris.instrument_imports(include=["tango_hpc"]):
        from tests.fuzz.targets import COUNTS, TARGETS

    started = time.monotonic()

    def once(data: bytes) -> None:
        TARGETS[name](data)
        once.runs += 1  # type: ignore[attr-defined]
        if once.runs >= runs:  # type: ignore[attr-defined]
            show(name, dict(COUNTS), started)
            os._exit(0)

    once.runs = 0  # type: ignore[attr-defined]
    # -timeout: an input that takes longer is a hang.
    atheris.Setup([sys.argv[0], "-timeout=30", "-rss_limit_mb=4096", "-print_final_stats=1", "-max_len=400"], once)
    atheris.Fuzz()
    return 1


def show(name: str, counts: dict[str, int], started: float) -> None:
    """What a target has counted."""
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print(f"{name}: {told}; {time.monotonic() - started:.0f} s", flush=True)


def main() -> int:
    """Entry point; 1 where something gave way."""
    names = ("outputs", "shown", "config", "records", "tables", "run_files")
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--guided", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(names):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    failed = 0
    for name in options.targets or names:
        if options.guided:
            failed += guided(name, options.runs) != 0
            continue
        from tests.fuzz.targets import COUNTS

        started = time.monotonic()
        COUNTS.clear()
        by_hypothesis(name, options.runs)
        show(name, dict(COUNTS), started)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
