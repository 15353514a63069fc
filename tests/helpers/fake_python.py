"""A Python whose pip has the indexes of $INDEXES and nothing else; all else but `-m venv` the real one does.

$INDEXES is JSON: the versions of torch by index, "configured" for the one that pip is set up with. What would be
installed of torch is written beside it, with the suffix .installed. It takes itself for Python 3.$PYTHON_MINOR.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

MINOR = os.environ.get("PYTHON_MINOR")
INDEXES = Path(os.environ.get("INDEXES", ""))


def make_fake_python(file: Path) -> Path:
    """A program at `file` that behaves as this module says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -P {__file__} "$0" "$@"\n')
    file.chmod(0o755)
    return file


def main() -> int:
    """Entry point; the arguments are this program's name and what it was started with."""
    program, *words = sys.argv[1:]
    if words[:2] == ["-m", "venv"]:
        (Path(words[2]) / "bin").mkdir(parents=True)
        shutil.copy(program, Path(words[2]) / "bin" / "python")
        return 0
    if words[:2] == ["-m", "pip"]:
        return install(words[2:])
    if words[0] == "-c" and MINOR:
        words[1] = f"import sys; sys.version_info = (3, {MINOR}, 0)\n{words[1]}"
    os.execv(sys.executable, [sys.executable, *words])


def install(words: list[str]) -> int:
    """pip's choice: of all indexes together, the highest version that the requirement allows."""
    if "--editable" in words:
        return 0
    indexes = json.loads(INDEXES.read_text())
    names = ["configured", *(words[i + 1] for i, word in enumerate(words) if word == "--extra-index-url")]
    lines = Path(words[words.index("-r") + 1]).read_text().split() if "-r" in words else words
    (requirement,) = (Requirement(line) for line in lines if line.startswith("torch=="))
    found = [Version(version) for name in names for version in indexes.get(name, [])]
    matching = sorted(requirement.specifier.filter(found))
    if not matching:
        print(f"ERROR: No matching distribution found for {requirement}", file=sys.stderr)
        return 1
    if "--dry-run" not in words:
        INDEXES.with_suffix(".installed").write_text(str(matching[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
