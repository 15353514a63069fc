"""progress.json: what a run is doing now, as rank 0 tells it."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from tango_hpc.base.files import Patience, fitting, read_json, write_atomically
from tango_hpc.base.run.directory import RunDirectory


def read_progress(directory: RunDirectory) -> dict[str, Any]:
    """Return the last progress of a run; empty where there is none."""
    data = read_json(directory.progress)
    return fitting(data, _state("", 0, 0)) if data else {}


def _state(stage: str, total_steps: int, first_step: int) -> dict[str, Any]:
    now = time.time()
    return {
        "stage": stage,
        "step": first_step,
        "first_step": first_step,
        "total_steps": total_steps,
        "role": None,
        "phase": "starting",
        "attempt_started": now,
        "phase_started": now,
        "notes": [],
        "troubles": [],
    }


class ProgressReporter:
    """Rank 0's side: keeps progress.json up to date. `first_step` is the last step of the checkpoint resumed from."""

    def __init__(self, directory: RunDirectory, stage: str, total_steps: int, first_step: int = 0) -> None:
        self._path = directory.progress
        self._state = _state(stage, total_steps, first_step)
        self._write()

    def phase(self, phase: str, *, step: int | None = None, role: str | None = None) -> None:
        """Say what happens from now on, e.g. "loading the generator", "rollout", "evaluation", "saving".

        `step` is the number of optimizer steps that are complete; it and `role` keep their values unless given.
        """
        self._state["phase"] = phase
        self._state["phase_started"] = time.time()
        if step is not None:
            self._state["step"] = step
        if role is not None:
            self._state["role"] = role
        self._write()

    def note(self, text: str) -> None:
        """Add a line that viewers show once."""
        self._state["notes"].append(text)
        self._write()

    def troubles(self, lasting: list[str]) -> None:
        """Say what is wrong with the training at present; `tango status` shows it. Written where it changes."""
        if lasting != self._state["troubles"]:
            self._state["troubles"] = lasting
            self._write()

    def _write(self) -> None:
        with Patience(math.inf):
            write_atomically(self._path, json.dumps(self._state) + "\n", durable=False)
