"""The half-billion model under Tango: python docs/figures/half_billion.py [RUN] [OUT.png]

Draws the curves of a run's metrics.jsonl and evaluations.jsonl, by default of those that the run of docs/reproduce.md, section 8, wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tango_hpc.files import read_json_lines
from tango_hpc.report.plots import save_curves

HERE = Path(__file__).parent

if __name__ == "__main__":
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "half_billion"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "half_billion_curves.png"
    save_curves(out, read_json_lines(run / "metrics.jsonl"), read_json_lines(run / "evaluations.jsonl"))
