"""The code of a run: a copy of this package beside the run, so that editing the checkout changes no waiting job."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.files import write_for_owner
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_provenance
from tango_hpc.runner.provenance import (
    CODE_STATE_FILE,
    COPIED_DIFF_FILE,
    PACKAGE,
    code_checksum,
    code_state,
    package_files,
)


def take_snapshot(snapshot: Path, *, record_diff: bool = False) -> Path:
    """Copy the package into the folder `snapshot` and return that, to be put on PYTHONPATH.

    The copy appears under its name only when it is whole. It holds what the package declares as its own, no data that
    lie in its folder, and beside them which code this is and its checksum; with `record_diff` also its uncommitted
    changes, masked, in a file that only the user can read.
    """
    if PACKAGE.parent == snapshot:
        return snapshot  # this is the copy
    partial = snapshot.with_name(f".snapshot.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    for file in package_files(PACKAGE):
        (partial / PACKAGE.name / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / file, partial / PACKAGE.name / file)
    state = code_state(PACKAGE.parent) | {"checksum": code_checksum(partial / PACKAGE.name)}
    diff = state.get("copied_from", state).pop("diff", "")  # that of the snapshot whose code this is, or the checkout's
    (partial / CODE_STATE_FILE).write_text(json.dumps(state))
    if diff and record_diff:
        write_for_owner(partial / COPIED_DIFF_FILE, diff)
    if snapshot.exists():
        old = snapshot.with_name(f".snapshot.old.{os.getpid()}")
        snapshot.rename(old)
        partial.rename(snapshot)
        shutil.rmtree(old)
    else:
        partial.rename(snapshot)
    return snapshot


def describe_snapshot(snapshot: Path) -> str:
    """Return a line that describes a snapshot."""
    sizes = [file.stat().st_size for file in (snapshot / PACKAGE.name).rglob("*") if file.is_file()]
    return f"The job runs a copy of the code: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MB in {snapshot}"


def check_runs_snapshot(snapshot: Path) -> None:
    """Raise CheckFailed unless the code of this process is the `snapshot` as it was copied."""
    if PACKAGE.parent != snapshot.resolve():
        raise CheckFailed(
            f"the code that runs is that of {PACKAGE.parent}, not the copy in {snapshot} that was submitted; does the "
            "profile's environment take PYTHONPATH away, or does its Python not read it?"
        )
    copied = json.loads((snapshot / CODE_STATE_FILE).read_text(encoding="utf-8"))["checksum"]
    if code_checksum(PACKAGE) != copied:
        raise CheckFailed(
            f"the code in {snapshot} was changed after it was copied (checksum {code_checksum(PACKAGE)[:12]}, not"
            f" {copied[:12]}); submit again with --resume, which takes a new copy"
        )


def check_runs_code_of_attempt(directory: RunDirectory) -> None:
    """Raise CheckFailed where a rank runs other code than its supervisor, such as that of a container's image."""
    attempts = read_provenance(directory)["attempts"]
    wanted = attempts[-1]["code"].get("checksum") if attempts else None
    if wanted is not None and code_checksum(PACKAGE) != wanted:
        raise CheckFailed(
            f"this rank runs the code of {PACKAGE.parent} (checksum {code_checksum(PACKAGE)[:12]}), the supervisor that"
            f" of {attempts[-1]['code']['path']} ({wanted[:12]}); does the container take PYTHONPATH away, or not see"
            " that folder?"
        )
