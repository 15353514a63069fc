"""The test cluster itself: a node that Slurm takes away comes back, or every later test would wait for it in vain."""

from __future__ import annotations

import subprocess

import pytest

from tests.slurm.conftest import ASKED
from tests.slurm.jobs import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


def states() -> set[str]:
    words = ["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T"]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


def test_a_drained_node_is_taken_back(cluster: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["scontrol", "update", "nodename=n2", "state=drain", f"reason={ASKED}"], check=True)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")  # as a test may have it that wants no Slurm
        wait_until(lambda: any(line.endswith(ASKED) for line in cluster), timeout=120)
    wait_until(lambda: states() == {"idle"}, timeout=120)
