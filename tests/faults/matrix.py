"""Runs cells of the fault matrix: a copy of one run is hit, goes on, and must reach what an uninterrupted run
reaches.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.stages.stage import TRAIN
from tests.faults.cells import NEEDS_ROOT, Cell
from tests.faults.starter import processes_of, start_command
from tests.helpers.runs import computed

LIMIT_SECONDS = 240.0  # of one attempt, the waiting for a hang included
DISK_MB = 96
# The schedule is v g g g; the run that is hit has done two of these.
SETTINGS = (
    "train.generator_steps=3",
    "algorithm.entropy_coef=0.5",  # models that know nothing earn no rewards, and would learn nothing
    "train.eval_every=0",
    "data.eval_questions=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep=8",
    "checkpoint.background=false",  # so that a fault of a save strikes it
    "launch.grace_seconds=20",
    "launch.hang_timeout_seconds=25",
    "launch.loading_timeout_seconds=45",
)
# Beside these, for a matrix of runs that train adapters.
ADAPTERS = ("generator.adapter.rank=4", "verifier.adapter.rank=4", "algorithm.kl_coef=0.01")
DONE_BEFORE, LAST = 2, 4


@dataclass(frozen=True)
class Result:
    """What came of a cell; `problem` is empty where all was as it must be."""

    fault: str
    phase: str
    problem: str
    code: int | None = None
    seconds: float = 0.0
    resumed_seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: code (None: it was still running at its limit), what the terminal showed."""

    code: int | None
    text: str
    seconds: float
    problem: str = ""


class Matrix:
    """Everything lies in `folder`; a run without faults is made there first, unless it is there already."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._reference = RunDirectory(folder / "reference")
        if not (folder / "ready").exists():
            shutil.rmtree(self._reference.path, ignore_errors=True)
            words = [sys.executable, "-P", "-m", "tests.faults.matrix", str(self._reference.path), *settings]
            subprocess.run(words, check=True)  # the import of what makes models stays out of this process
        TRAIN.load("cpu")  # with all that ranks import
        import tango_hpc.report.run_page

        assert tango_hpc.report.run_page
        if not (folder / "ready").exists():
            ended = self._attempt(self._reference, None, "reference")
            assert ended.code == 0 and not ended.problem, f"{ended.problem}\n{ended.text}"
            saved = [_weights(self._reference, step) for step in range(1, LAST + 1)]
            assert all(now != before for before, now in itertools.pairwise(saved)), "a step has changed nothing"
            (folder / "ready").touch()

    def run(self, cell: Cell) -> Result:
        """Hit a copy of the run, let it go on, compare."""
        if cell.fault in NEEDS_ROOT and os.geteuid() != 0:
            return Result(cell.fault, cell.phase, "not run: mounting a disk needs root")
        with _small_disk(self._folder / "cell") as place:
            directory = RunDirectory(place / "run")
            self._copy_interrupted(directory)
            hit = self._attempt(directory, cell, cell.name)
            _unmount(directory.path)
            for file in directory.path.glob("filling_*"):
                file.unlink()
            expected = cell.expected
            on = hit if hit.code == 0 else self._attempt(directory, None, cell.name)
            told = (hit, on)[expected.told_by].text
            match = re.search(expected.message, told, re.MULTILINE)
            problems = [hit.problem, on.problem]
            if hit.code != expected.code:
                problems.append(f"exit code {hit.code} instead of {expected.code}")
            if match is None:
                problems.append("it was not told")
            if on.code != 0:
                problems.append(f"going on ended with exit code {on.code}")
            else:
                problems += [difference(self._reference, directory)]
            problem = "; ".join(filter(None, problems))
            if problem:
                kept = self._folder / "failed" / cell.name
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(directory.path, kept)
            message = match[0] if match is not None else ""
            seconds = on.seconds if on is not hit else 0.0
            return Result(cell.fault, cell.phase, problem, hit.code, hit.seconds, seconds, message)

    def _copy_interrupted(self, directory: RunDirectory) -> None:
        """The reference, as it would be had it been killed after two steps."""
        ignored = [f"step_{step:06d}" for step in range(DONE_BEFORE + 1, LAST + 1)]
        shutil.copytree(self._reference.path, directory.path, ignore=shutil.ignore_patterns(*ignored, "summary.json"))

    def _attempt(self, directory: RunDirectory, cell: Cell | None, name: str) -> Ended:
        console = self._folder / f"{name}.{'hit' if cell else 'on'}.txt"
        console.unlink(missing_ok=True)
        temporary = self._folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        shared = set(os.listdir("/dev/shm"))
        started = time.monotonic()
        command = start_command(directory, cell, console, temporary)
        while command.poll() is None and time.monotonic() - started < LIMIT_SECONDS:
            time.sleep(0.1)
        seconds = time.monotonic() - started
        problems = [f"not ended within {LIMIT_SECONDS:.0f} s"] if command.returncode is None else []
        gone_by = time.monotonic() + 10
        while time.monotonic() < gone_by and command.returncode is not None and [*processes_of(command.pid)]:
            time.sleep(0.1)
        left = [*processes_of(command.pid)]
        for pid in left:
            os.kill(pid, 9)
        if left and command.returncode is not None:
            problems.append(f"{len(left)} processes were left running")
        code, _ = command.returncode, command.wait()
        if code in (0, 85) and (found := sorted({*os.listdir(temporary), *(set(os.listdir("/dev/shm")) - shared)})):
            problems.append(f"left behind: {', '.join(found)}")
        text = console.read_text(errors="replace")
        return Ended(code, text, seconds, "; ".join(problems))


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A disk of its own for a run, where this user may mount one."""
    _unmount(folder / "run")
    _unmount(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    mounted = os.geteuid() == 0
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        _unmount(folder / "run")
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _unmount(folder: Path) -> None:
    """Whatever is mounted there, also what is only another view of the folder itself."""
    while any(line.split()[4] == str(folder) for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def difference(reference: RunDirectory, directory: RunDirectory) -> str:
    """In what two finished runs differ: weights, optimizers, metrics."""
    wanted, found = _weights(reference, LAST), _weights(directory, LAST)
    if len(wanted) != 8 or found != wanted:  # of two ranks and two roles, weights and what training needs besides
        return "other weights than the reference's"
    rows = [[computed(row) for row in read_metrics(run)] for run in (reference, directory)]
    return "" if rows[0] == rows[1] and len(rows[0]) == LAST else "other metrics than the reference's"


def _weights(run: RunDirectory, step: int) -> dict[str, bytes]:
    """The files of a checkpoint that hold weights and optimizers."""
    folder = run.checkpoints / "train" / f"step_{step:06d}"
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.distcp")}


def read_results(file: Path) -> dict[Cell, Result]:
    """The results in a file, the last one of each cell."""
    lines = file.read_text().splitlines() if file.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {Cell(result.fault, result.phase): result for result in results}


def add_result(file: Path, result: Result) -> None:
    """Add one to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def main() -> None:
    """Prepare the reference: a run directory with data and untrained models."""
    from tests.helpers.runs import prepare_small_run

    prepare_small_run(Path(sys.argv[1]), *SETTINGS, *sys.argv[2:])


if __name__ == "__main__":
    main()
