"""The code of a run: a copy of this package beside the run, so that editing the checkout changes no waiting job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import tango_hpc
from tango_hpc.run.directory import RunDirectory

PACKAGE = Path(tango_hpc.__file__).resolve().parent


def take_snapshot(directory: RunDirectory) -> Path:
    """Copies the package into RUN/snapshot and returns that folder, to be put on PYTHONPATH.

    The copy appears under its name only when it is whole. Data, models and version control are not part of it.
    """
    if PACKAGE.parent == directory.snapshot:
        return directory.snapshot  # this is the copy
    partial = directory.snapshot.with_name(f".snapshot.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(PACKAGE, partial / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
    if directory.snapshot.exists():
        old = directory.snapshot.with_name(f".snapshot.old.{os.getpid()}")
        directory.snapshot.rename(old)
        partial.rename(directory.snapshot)
        shutil.rmtree(old)
    else:
        partial.rename(directory.snapshot)
    return directory.snapshot
