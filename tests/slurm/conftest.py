"""A Slurm cluster of two nodes for this test session, started by tools/slurm_test_cluster.sh."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "slurm_test_cluster.sh"
ENV = "/usr/bin/env"
ASKED = "asked by a test"  # the reason for which a test drains a node


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Slurm's commands talk to the test cluster while this is in use; skips where it cannot be started.

    The nodes that Slurm has drained so far, with its reasons.
    """
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, timeout=120, check=False)
    if started.returncode != 0:
        pytest.skip(started.stderr.strip().splitlines()[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("OMP_NUM_THREADS", "1")
        with _drained_nodes_taken_back() as drained:
            yield drained
    subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=120, check=True)


@contextmanager
def _drained_nodes_taken_back() -> Iterator[list[str]]:
    """Does what an administrator would when Slurm takes a node away from all later jobs ("Kill task failed").

    slurmstepd sometimes does not see that a step has ended which was cancelled while it was being launched. Each time
    is told among the warnings.
    """
    over, environment = threading.Event(), dict(os.environ)  # a test may change what is on the PATH
    drained: list[str] = []

    def ask(*words: str) -> str:
        command = [ENV, *words]  # looks for the program in the environment that it is given
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False).stdout

    def look() -> None:
        while not over.wait(2):
            with suppress(subprocess.TimeoutExpired):  # a busy machine: asked again
                found = ask("sinfo", "--noheader", "--Node", "--partition=debug", "--states=drain", "--format=%N %E")
                for line in found.splitlines():
                    ask("scontrol", "update", f"nodename={line.split()[0]}", "state=resume")
                    drained.append(line)

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield drained
    finally:
        over.set()
        watch.join()
        for line in (line for line in drained if not line.endswith(ASKED)):
            warnings.warn(f"Slurm drained a node of the test cluster, which was taken back: {line}", stacklevel=1)


@pytest.fixture(scope="module", autouse=True)
def _no_job_is_left_to_the_next_file(cluster: list[str]) -> Iterator[None]:
    """Cancels what a test that failed has left in the queue."""
    yield
    subprocess.run(["scancel", "--user", str(os.geteuid())], timeout=60, check=False)
    ended_by = time.monotonic() + 60
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=60, check=True).stdout:
        assert time.monotonic() < ended_by, "jobs of the test cluster do not end"
        time.sleep(0.2)
