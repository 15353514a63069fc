"""`python -m tests.faults.memory [--folder DIR] [--write]`: what every process of a run holds over 300 steps.

A tiny run with checkpoints, evaluations and dumps, watched from outside: resident memory and open files of each
process, and what is left in the temporary folder and in shared memory. `--write` puts curve and table into
docs/promises.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.progress import read_progress
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.heartbeat import read_beat
from tests.helpers.runs import ROOT, prepare_small_run

NUM_STEPS = 300
SETTINGS = (
    "train.generator_steps=225",  # 1 of the verifier, then 3 + 1 in turn: 300 steps
    "train.eval_every=0",
    "train.dump_every=15",
    "checkpoint.every_steps=10",
    "launch.loading_timeout_seconds=300",
)
WARM_UP = 100  # steps; what is compared comes after them
SPAN = 50  # steps at either end of the rest, of each of which the median counts
MAX_GROWTH = 0.03
WATCH_SECONDS = 1.0
BEGIN, END = "<!-- table: python -m tests.faults.memory -->", "<!-- end of the table of memory -->"
PAGE, PICTURE = ROOT / "docs/promises.md", ROOT / "docs/figures/memory.svg"


@dataclass(frozen=True)
class Sample:
    """One process after `step` optimizer steps."""

    step: int
    resident_mb: float
    num_files: int


def watch(directory: RunDirectory, command: subprocess.Popen[bytes]) -> dict[str, list[Sample]]:
    """Samples of each process by name, until the command has ended."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    while command.poll() is None:
        step = read_progress(directory).get("step", 0)
        pids = {"supervisor": command.pid}
        for file in directory.heartbeats.glob("*.json"):
            worker = Worker.from_stem(file.stem)
            if (pid := read_beat(directory, worker).pid) is not None:
                pids[str(worker)] = pid
        for name, pid in pids.items():
            try:
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
                samples[name].append(Sample(step, resident / 2**20, len(os.listdir(f"/proc/{pid}/fd"))))
            except OSError:
                continue  # it has just ended
        time.sleep(WATCH_SECONDS)
    return samples


def median(samples: list[Sample], first: int, last: int, what: str) -> float:
    """Of the samples between two steps."""
    return statistics.median(getattr(sample, what) for sample in samples if first <= sample.step <= last)


def table(samples: dict[str, list[Sample]]) -> tuple[str, list[str]]:
    """What is compared, in Markdown, and what is not as promised."""
    early, late = (WARM_UP, WARM_UP + SPAN), (NUM_STEPS - SPAN, NUM_STEPS)
    lines = [
        f"| process | MB at steps {early[0]} to {early[1]} | at steps {late[0]} to {late[1]} | growth | open files |",
        "| --- | --- | --- | --- | --- |",
    ]
    problems = []
    for name, found in sorted(samples.items()):
        before, after = (median(found, *span, "resident_mb") for span in (early, late))
        files = [int(median(found, *span, "num_files")) for span in (early, late)]
        growth = after / before - 1
        lines.append(f"| {name} | {before:.0f} | {after:.0f} | {100 * growth:+.1f}% | {files[0]} → {files[1]} |")
        if growth > MAX_GROWTH:
            problems.append(f"{name} grew by {100 * growth:.1f}%")
        if files[0] != files[1]:
            problems.append(f"{name} has {files[1]} open files, had {files[0]}")
    return "\n".join(lines), problems


def draw(samples: dict[str, list[Sample]]) -> None:
    """The curve."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    for name, found in sorted(samples.items()):
        axes.plot([sample.step for sample in found], [sample.resident_mb for sample in found], label=name, lw=1)
    axes.set(xlabel="optimizer step", ylabel="resident memory (MB)", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> int:
    """Entry point; 1 where something grew or was left."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.memory", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/memory-of-a-run"))
    parser.add_argument("--write", action="store_true", help="put curve and table into docs/promises.md")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    temporary = options.folder / "tmp"
    temporary.mkdir(parents=True)
    _, directory = prepare_small_run(options.folder / "run", *SETTINGS)
    shared = set(os.listdir("/dev/shm"))
    words = [sys.executable, "-P", "-m", "tango_hpc.commands.cli", "train", str(directory.config), "--resume"]
    with (options.folder / "log.txt").open("wb") as log:
        command = subprocess.Popen(words, env=os.environ | {"TMPDIR": str(temporary)}, stdout=log, stderr=log)
        samples = watch(directory, command)
    shown, problems = table(samples)
    problems += [f"exit code {command.returncode}"] if command.returncode else []
    left = sorted({*os.listdir(temporary), *(set(os.listdir("/dev/shm")) - shared)})
    problems += [f"left behind: {', '.join(left)}"] if left else []
    print(f"{shown}\n\n" + ("\n".join(problems) or "Nothing grew by more than 3%, nothing was left behind."))
    if options.write:
        draw(samples)
        text = PAGE.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{shown}\n{END}{after}")
    return int(bool(problems))


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    sys.exit(main())
