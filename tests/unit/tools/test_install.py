"""tools/install.sh with a pip that has other indexes: where the CPU build of torch comes from, and for which
Pythons.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tango_hpc.commands.doctor import PYTHONS
from tests.helpers.fake_python import make_fake_python

ROOT = Path(__file__).parents[3]
PYTORCH = "https://download.pytorch.org/whl/cpu"
PINNED = re.search(r"^torch==(.+)$", (ROOT / "tools/requirements-cpu.txt").read_text(), re.MULTILINE).group(1)
RELEASE = PINNED.removesuffix("+cpu")

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the pinned list is for Linux on x86-64"
)


class Clone:
    """A clone with nothing but what the script reads, and a Python with the given indexes."""

    def __init__(self, folder: Path, indexes: dict[str, list[str]]) -> None:
        self.folder = folder / "my clone"
        (self.folder / "tools").mkdir(parents=True)
        for name in ("tools/install.sh", "tools/requirements-cpu.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder / name)
        self.indexes = folder / "indexes.json"
        self.indexes.write_text(json.dumps(indexes))
        self.python = make_fake_python(folder / "bin" / "python3.13")
        roomy = folder / "bin" / "df"  # whatever the disk of the tests has
        roomy.write_text("#!/bin/sh\nprintf 'Filesystem 1M-blocks Used Available\\n/dev/x 9 9 99999\\n'\n")
        roomy.chmod(0o755)

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Sources the script as quickstart.sh does, and says where `python` then is."""
        env = os.environ | {"INDEXES": str(self.indexes), "PYTHON": str(self.python)}
        env |= {"PATH": f"{self.python.parent}:{os.environ['PATH']}"} | variables
        words = ["bash", "-c", "set -euo pipefail; source tools/install.sh; command -v python"]
        return subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    @property
    def installed(self) -> str:
        """The version of torch that pip would have installed."""
        return self.indexes.with_suffix(".installed").read_text()


def test_an_index_with_the_cpu_build_is_enough(tmp_path: Path) -> None:
    clone = Clone(tmp_path, {"configured": [RELEASE, PINNED], PYTORCH: []})
    done = clone.install()
    assert done.returncode == 0, done.stderr
    assert clone.installed == PINNED and "PyTorch" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"{clone.folder}/.venv/bin/python"
    again = clone.install(PYTHON="never asked for")
    assert (again.returncode, again.stdout) == (0, f"{clone.folder}/.venv/bin/python\n")


@pytest.mark.parametrize("others", [[RELEASE], [f"{RELEASE}+cu130", RELEASE], ["1.0"], []])
def test_else_it_comes_from_pytorchs_own_index_and_that_is_said(tmp_path: Path, others: list[str]) -> None:
    clone = Clone(tmp_path, {"configured": others, PYTORCH: [RELEASE.replace("2", "1"), PINNED]})
    done = clone.install()
    assert done.returncode == 0, done.stderr
    assert clone.installed == PINNED
    assert f"no CPU build of torch (torch=={PINNED}); taking it from PyTorch's, {PYTORCH}" in done.stdout


def test_torch_index_comes_before_both(tmp_path: Path) -> None:
    mine = "https://mirror.example.org/cpu"
    clone = Clone(tmp_path, {"configured": [RELEASE], mine: [PINNED], PYTORCH: []})
    done = clone.install(TORCH_INDEX=mine)
    assert done.returncode == 0, done.stderr
    assert clone.installed == PINNED and "PyTorch" not in done.stdout


@pytest.mark.parametrize("pytorch", [{PYTORCH: [RELEASE]}, {}], ids=["without it", "unreachable"])
def test_nowhere_to_be_found_is_said_with_the_way_out(tmp_path: Path, pytorch: dict[str, list[str]]) -> None:
    clone = Clone(tmp_path, {"configured": [RELEASE], **pytorch})
    done = clone.install()
    assert done.returncode == 2
    assert f"ERROR: No matching distribution found for torch=={PINNED}" in done.stderr
    assert re.search(
        rf"Cannot set up: pip finds no torch=={re.escape(PINNED)} for Python 3\.\d+\.\d+ on {PYTORCH}", done.stderr
    )
    assert "give a mirror of it as TORCH_INDEX=URL" in done.stderr
    assert not clone.indexes.with_suffix(".installed").exists()
    assert clone.install().returncode == 2  # nothing was taken for done


def test_a_wrong_torch_index_is_not_passed_over(tmp_path: Path) -> None:
    clone = Clone(tmp_path, {"configured": [RELEASE], PYTORCH: [PINNED]})
    done = clone.install(TORCH_INDEX="https://typo.example.org")
    assert done.returncode == 2 and "on https://typo.example.org (above)" in done.stderr


def test_every_python_that_the_package_allows_is_taken_and_no_other(tmp_path: Path) -> None:
    clone = Clone(tmp_path, {"configured": [PINNED]})
    allowed = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    first, beyond = (int(minor) for minor in allowed.groups())
    for minor in range(first, beyond):
        assert clone.install(PYTHON_MINOR=str(minor)).returncode == 0
        shutil.rmtree(clone.folder / ".venv")
        assert (3, minor) in PYTHONS
    for minor in (first - 1, beyond):
        done = clone.install(PYTHON_MINOR=str(minor))
        assert done.returncode == 2 and f"is needed and none was found as {clone.python}" in done.stderr
    assert len(PYTHONS) == beyond - first
