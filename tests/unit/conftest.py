"""Fixtures of several files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.fake_slurm import FakeSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A controller that is down, until a test says otherwise."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return FakeSlurm(tmp_path, monkeypatch)
