"""The code of a run: a copy of this package beside the run, so that editing the checkout changes no waiting job."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tango_hpc.launch.provenance import CODE_STATE_FILE, code_state

PACKAGE = Path(__file__).resolve().parents[1]


def take_snapshot(snapshot: Path) -> Path:
    """Copy the package into the folder `snapshot` and return that, to be put on PYTHONPATH.

    The copy appears under its name only when it is whole. Data, models and version control are not part of it.
    """
    if PACKAGE.parent == snapshot:
        return snapshot  # this is the copy
    partial = snapshot.with_name(f".snapshot.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(PACKAGE, partial / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
    (partial / CODE_STATE_FILE).write_text(json.dumps(code_state(PACKAGE.parent)))
    if snapshot.exists():
        old = snapshot.with_name(f".snapshot.old.{os.getpid()}")
        snapshot.rename(old)
        partial.rename(snapshot)
        shutil.rmtree(old)
    else:
        partial.rename(snapshot)
    return snapshot
