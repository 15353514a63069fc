"""provenance.json: which code ran where, on what, and how it was started. Holds no secrets.

One entry per attempt, so that a run which was requeued shows all its machines. Of the environment, only the variables
named in `ENVIRONMENT_ALLOWED` are kept; the address of the git remote, which may hold a token, is not. Uncommitted
changes lie in a file of their own that only the user can read; what looks like a secret in them is masked.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tango_hpc.base.files import write_for_owner
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import code_that_ran, package_versions, read_provenance, write_provenance
from tango_hpc.runner.masks import mask_secrets, masked_command

ENVIRONMENT_ALLOWED = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_HOST",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME",
    "CONDA_DEFAULT_ENV", "VIRTUAL_ENV", "LOADEDMODULES", "HF_HUB_OFFLINE",
)  # fmt: skip

PACKAGE = Path(__file__).resolve().parents[1]
# What the package is made of, as pyproject.toml declares it beside Python files; whatever else lies in its folder is
# not.
PACKAGE_DATA = ("report/templates/*", "base/shipped_prompts/*", "py.typed")
CODE_STATE_FILE = "code_state.json"
COPIED_DIFF_FILE = "uncommitted.diff"  # beside it, for the owner alone and only where it was asked for
MAX_DIFF_CHARS = 500_000


def package_files(package: Path = PACKAGE) -> list[Path]:
    """Return the files of the package in that folder, seen from there; nothing hidden."""
    found = {file for pattern in ("**/*.py", *PACKAGE_DATA) for file in package.glob(pattern) if file.is_file()}
    files = (file.relative_to(package) for file in found)
    return sorted(file for file in files if not any(part.startswith(".") for part in file.parts))


def code_checksum(package: Path = PACKAGE) -> str:
    """Return SHA-256 of the names and contents of the package's files."""
    total = hashlib.sha256()
    for file in package_files(package):
        total.update(f"{file.as_posix()}\0{hashlib.sha256((package / file).read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def code_state(folder: Path) -> dict[str, Any]:
    """Return commit, branch, changed files and diff of the git checkout at `folder`; only the path where it is none.

    A copy of the code that was taken with its state (`CODE_STATE_FILE`, written at submission) tells that instead:
    a run directory may lie in some other checkout, whose commit would be the wrong one.
    """
    state: dict[str, Any] = {"path": str(folder)}
    recorded = folder / CODE_STATE_FILE
    if recorded.is_file():
        copied, diff_file = json.loads(recorded.read_text(encoding="utf-8")), folder / COPIED_DIFF_FILE
        if diff_file.is_file():
            copied["diff"] = diff_file.read_text(encoding="utf-8")
        return state | {"copied_from": copied}
    top = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top.strip()) != folder.resolve():
        return state
    diff = _git(folder, "diff", "HEAD") or ""
    state["commit"] = commit.strip()
    state["branch"] = (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip()
    state["changed"] = (_git(folder, "status", "--porcelain") or "").splitlines()
    state["diff"] = mask_secrets(diff[:MAX_DIFF_CHARS])
    state["diff_truncated"] = len(diff) > MAX_DIFF_CHARS
    return state


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that is safe and useful to keep."""
    return {name: variables[name] for name in ENVIRONMENT_ALLOWED if name in variables}


def note_changes(directory: RunDirectory, changes: Iterable[str]) -> None:
    """Keep changes of the configuration for the entry of the next attempt, which may start much later and elsewhere."""
    provenance = read_provenance(directory)
    write_provenance(directory, provenance | {"changes": [*provenance["changes"], *changes]})


def record_attempt(
    directory: RunDirectory,
    *,
    stage: str,
    command: Sequence[str] | None = None,
    record_diff: bool = True,
    computes_with: Mapping[str, Any] | None = None,
) -> None:
    """Add this attempt to provenance.json. `command` is `sys.argv` unless given.

    `computes_with`: the part of the entry that `continuity.compare_with_last` has found.
    """
    provenance = read_provenance(directory)
    attempts = provenance["attempts"]
    code = code_state(PACKAGE.parent) | {"checksum": code_checksum()}
    origin = code.get("copied_from", code)
    diff = origin.pop("diff", "")
    if diff and record_diff:
        origin["diff_file"] = _keep_diff(directory, diff)
    attempt = {
        "attempt": len(attempts) + 1,
        "stage": stage,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": sys.executable,
        "working_directory": os.getcwd(),
        "command": masked_command(sys.argv if command is None else command),
        "environment": environment(os.environ),
        "versions": package_versions(),
        "code": code,
        "config_changes": provenance["changes"],
        **(computes_with or {}),
    }
    if attempts:
        attempt["changes"] = [*attempt.get("changes", []), *_code_changes(attempts[-1], attempt)]
    write_provenance(directory, {"attempts": [*attempts, attempt]})


def _keep_diff(directory: RunDirectory, diff: str) -> str:
    """Write uncommitted changes where only the user can read them; the file's name, one for equal changes."""
    file = directory.path / f"uncommitted_{zlib.crc32(diff.encode('utf-8', 'replace')):08x}.diff"
    if not file.exists():
        write_for_owner(file, diff)
    return file.name


def _code_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences in software between two attempts."""

    def software(entry: Mapping[str, Any]) -> dict[str, str]:
        code = code_that_ran(entry)
        changed = " with changes" if code.get("changed") else ""
        return {"code": (code["commit"][:12] or "?") + changed} | entry["versions"]

    old, new = software(before), software(now)
    return [f"{name}: {old[name]} -> {new[name]}" for name in old if name in new and old[name] != new[name]]


def _git(folder: Path, *arguments: str) -> str | None:
    """Return output of a git command, or None where git or a repository is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
