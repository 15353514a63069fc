"""Slurm's commands as scripts that say what a test wants: for outages, which a real controller has at its own times."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, remember_job
from tango_hpc.runner.enter import prepare_run
from tango_hpc.stages.stage import TRAIN
from tests.slurm.jobs import counting_config

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"  # of Slurm 22.05
GONE = "slurm_load_jobs error: Invalid job id specified"


class FakeSlurm:
    """Commands in a folder that comes first on PATH; every call is noted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "fake slurm"
        self._folder.mkdir()
        patch.setenv("PATH", f"{self._folder}:{os.environ['PATH']}")
        for command in ("sbatch", "squeue", "scontrol", "scancel"):
            self.fails(command)

    def runs(self, command: str, script: str) -> None:
        """`command` runs `script`, whose arguments are those of the command."""
        calls = shlex.quote(str(self._folder / "calls"))
        file = self._folder / command
        file.write_text(f'#!/bin/bash\necho "{command} $*" >>{calls}\n{script}\n')
        file.chmod(0o755)

    def says(self, command: str, text: str) -> None:
        """`command` prints `text`."""
        self.runs(command, f"echo {shlex.quote(text)}")

    def fails(self, command: str, error: str = DOWN) -> None:
        """`command` prints `error` and fails; without one, as it does while the controller is down."""
        self.runs(command, f"echo {shlex.quote(error)} >&2; exit 1")

    def calls(self) -> list[str]:
        """All calls so far, with their arguments."""
        file = self._folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


def described(job: str, state: str = "RUNNING", **more: str) -> str:
    """A line of `scontrol show job -o`."""
    fields = {"Requeue": "1", "BatchFlag": "1", "TimeLimit": "01:00:00", "EndTime": "2026-01-31T12:00:00"} | more
    return " ".join([f"JobId={job} JobName=x JobState={state} Reason=None", *(f"{k}={v}" for k, v in fields.items())])


def submitted_run(folder: Path, *, started: bool = True, name: str = "run") -> RunDirectory:
    """A run that was submitted as job 7, which has made an attempt where it `started`."""
    directory = prepare_run([TRAIN], counting_config(folder, name, {"nodes": 1}), resume=False)
    seventh = SimpleNamespace(job_id="7", paths=SimpleNamespace(stdout=folder / "none.log"))
    remember_job(directory, "train", "slurm", seventh, None)
    if started:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_JOB_ID", "7")
            patch.setenv(slurm.BATCH_MARK, f"7:{os.getpid()}")
            AttemptLog(directory).start(TRAIN)
    return directory


def said(action: Callable[[Console], None]) -> str:
    """What `action` prints."""
    console = Console(record=True, width=400, file=io.StringIO())
    action(console)
    return console.export_text()
