"""Packages that the environment of the tests does not have, in a folder of their own beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def install_beside(folder: Path, *names: str) -> Path:
    """Install these, and what they need and is missing, into `folder`; skips where no package index gives them.

    What is there already is left as it is, so that the folder can stand in PYTHONPATH.
    """
    asked = _pip("install", "--dry-run", "--report", "-", *names)
    missing = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in json.loads(asked)["install"]]
    if missing:
        _pip("install", "--no-deps", "--target", str(folder), *missing)
    return folder


def _pip(*arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--no-input",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {' '.join(arguments)}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.stdout
