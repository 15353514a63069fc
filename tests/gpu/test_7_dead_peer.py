"""A rank that is lost in the middle of what NCCL does: who it was and where must be written down, not NCCL's
own end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.outcome import find_cause, read_outcome
from tests.gpu.conftest import Note

SECONDS = 60
LIMIT_SECONDS = {"cuda": 15.0, "cpu": 10.0}  # above what a heartbeat takes for a stall
PHASES = {"sync": "weight sync", "update": "train"}


@pytest.mark.parametrize("how", ["held", "killed"])
@pytest.mark.parametrize("where", ["sync", "update"])
def test_a_lost_peer(device: torch.device, where: str, how: str, note: Note, tmp_path: Path) -> None:
    """Part 7: where a rank is lost in a weight sync or an update, role, rank and phase are what is written."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, here {torch.cuda.device_count()}")
    limit, spec = LIMIT_SECONDS[device.type], tmp_path / "spec.json"
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    spec.write_text(json.dumps({"run": str(run.path), "where": where, "how": how, "limit_seconds": limit}))
    words = [sys.executable, "-P", "-m", "tests.helpers.dead_peer", str(spec)]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200)
    said = done.stdout[-3000:] + done.stderr[-5000:]
    assert done.returncode == 1, said

    waiting, lost = (read_outcome(run, Worker(rank, "generator")) for rank in (0, 1))
    assert waiting is not None and lost is not None, said
    assert re.match(rf"rank 0 \(generator\) on \S+ failed in phase '{PHASES[where]}': \S", waiting.title()), said
    seconds = waiting.time - float((run.path / "started").read_text())
    note("written after", seconds, "s", f"the limit is {limit:g}")
    if how == "killed":
        cause = find_cause(run, [])[0]
        assert cause == lost and cause.phase == PHASES[where] and cause.error.startswith("killed by SIGKILL"), said
        return
    assert lost.code == 0 and seconds >= 0.9 * limit
    if where == "update":  # the supervisor blames the one that does not
        assert json.loads((run.path / "waits").read_text()) == [True, False], said
    if where == "sync":  # before NCCL's watchdog, whose limit is above that of a sync
        assert seconds < 2 * limit
        assert re.match(
            r"WeightSyncError: weight sync, rank 0, phase receive: \S.* from rank 1 failed after \d+\.\d s "
            rf"\(reshard.timeout_seconds is {limit:g}\)",
            waiting.error,
        ), said
