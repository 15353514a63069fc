"""A Slurm cluster of two nodes for this test session, started by tools/slurm_test_cluster.sh."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "slurm_test_cluster.sh"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm's commands talk to the test cluster while this is in use; skips where it cannot be started."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, timeout=120, check=False)
    if started.returncode != 0:
        pytest.skip(started.stderr.strip().splitlines()[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=120, check=True)


@pytest.fixture(scope="module", autouse=True)
def _no_job_is_left_to_the_next_file(cluster: None) -> Iterator[None]:
    """Cancels what a test that failed has left in the queue."""
    yield
    subprocess.run(["scancel", "--user", str(os.geteuid())], timeout=60, check=False)
    ended_by = time.monotonic() + 60
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=60, check=True).stdout:
        assert time.monotonic() < ended_by, "jobs of the test cluster do not end"
        time.sleep(0.2)
