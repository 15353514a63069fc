"""Rates of this machine, and what they predict of another run here: `python -m tools.bench.predicted`.

Nothing else may run here meanwhile. Takes four minutes on two cores; prints a row for each phase of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from rich.console import Console

from tango_hpc.base.config import load_config
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.measure_rates import measure_rates, small_run
from tango_hpc.questions.tasks.tiny import build_tiny_model
from tools.bench.published import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"
# Of another size than the models of `tango doctor --rates`.
MODEL = TinyModelConfig(hidden_size=256, intermediate_size=768, num_heads=8)


def main() -> None:
    """Measure the rates, run, and print the table of RUN/expected.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own_run = [f"run.dir={folder / 'none'}"]  # what lies in ./runs/quickstart must not count
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        measure_rates(QUICKSTART, own_run, Console(file=sys.stderr))
        for seed, role in enumerate(("generator", "verifier")):
            build_tiny_model(folder / role, MODEL, seed)
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(small_run(load_config(QUICKSTART, own_run), folder, 12, 4, steps=6)))
        subprocess.run([sys.executable, "-P", "-m", "tango_hpc.commands.cli", "train", str(file)], check=True)
        for row in json.loads(RunDirectory(folder / "run").expected.read_text())["phases"]:
            predicted, measured = row["predicted"], row["measured"]
            ratio = predicted / measured if measured else float("inf")
            print(f"| {row['role']} | {row['phase']} | {predicted:.2f} | {measured:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
