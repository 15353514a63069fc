"""`python -m tools.bench start`: from the command to the first generated token, against a script with bare vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.bench.measure import Measurement
from tools.bench.workload import SMALL, make_model, run_config


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """Seconds of both; ours are those of a run with one role until its first evaluation is written."""
    model = make_model(folder / "small", SMALL)
    ours, theirs = [], []
    for turn in range(min(repeats, 3)):
        run = folder / f"start-{turn}"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        config = run_config(run, model, verifier=False, steps=1, questions=4, max_tokens=8,
                            ranks=min(2, len(os.sched_getaffinity(0))))  # fmt: skip
        ours.append(_seconds_until(
            [sys.executable, "-P", "-m", "tango_hpc.commands.cli", "train", str(config)], run / "run/evaluations.jsonl"
        ))  # fmt: skip
        theirs.append(
            _seconds_until([sys.executable, "-P", str(Path(__file__).with_name("bare_start.py")), str(model)], None)
        )
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return [Measurement("start", "command to first evaluation", "bare vLLM, to its first token", "s", ours, theirs,
                        ratios, 1.5, False)]  # fmt: skip


def _seconds_until(words: list[str], file: Path | None) -> float:
    """Until `file` has something in it, or, without one, until the program writes a line."""
    start = time.perf_counter()
    output = subprocess.DEVNULL if file is not None else subprocess.PIPE
    process = subprocess.Popen(words, stdout=output, stderr=subprocess.DEVNULL, text=True)
    if file is None:
        assert process.stdout is not None
        found = any(line.startswith("first token") for line in process.stdout)
    else:
        while not (found := file.is_file() and file.stat().st_size > 0) and process.poll() is None:
            time.sleep(0.01)
    seconds = time.perf_counter() - start
    process.wait()
    if not found:
        raise RuntimeError(f"{' '.join(words[:5])} ended with {process.returncode} before its first token")
    return seconds
