"""The half-billion model under Tango (docs/reproduce.md, section 8): python docs/figures/half_billion.py

Draws what that run has left in the folder beside this file, as `tango report` draws a run that is there.
"""

from __future__ import annotations

from pathlib import Path

from tango_hpc.files import read_json_lines
from tango_hpc.report.plots import save_curves

HERE = Path(__file__).parent

if __name__ == "__main__":
    rows, evaluations = (read_json_lines(HERE / f"half_billion/{name}.jsonl") for name in ("metrics", "evaluations"))
    save_curves(HERE / "half_billion_curves.png", rows, evaluations)
