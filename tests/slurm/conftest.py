"""A Slurm cluster of two nodes for this test session, started by tools/slurm_test_cluster.sh."""

from __future__ import annotations

import os
import subprocess
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
