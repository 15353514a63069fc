"""Checkpoints: everything that a stage needs to go on, complete or not there at all.

RUN/checkpoints/STAGE/
  step_000012/             after 12 optimizer steps
    generator/ verifier/   weights, optimizer, learning-rate step (Megatron's distributed checkpoint format)
    state.json             counters, sampler, moving averages, and what an unfinished step had computed so far
  step_000012+rollout/     the same weights, and the rollouts of step 13

A checkpoint is written under a name that begins with a dot and renamed when every process has written its part, so a
full disk, a kill or a crash while saving leaves the last complete one as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tango_hpc.errors import CheckFailed
from tango_hpc.parallel.exchange import Exchange, PeerFailedError
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.steps import StepName, steps_in


class Saved(Protocol):
    """What a checkpoint holds a folder of: a `Policy`, or a `Role` with one."""

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


class Checkpoints:
    """The checkpoints of one stage. Its methods are collective over all processes; the first does the housekeeping."""

    def __init__(self, directory: RunDirectory, stage: str, keep: int, exchange: Exchange) -> None:
        self._folder = directory.checkpoints / stage
        self._keep, self._exchange = keep, exchange
        if exchange.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(".step_*"):
                shutil.rmtree(leftover)
        exchange.barrier()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, as the first process sees the folder: others may see it late."""
        return self._exchange.all_gather(next((path for _, path in reversed(steps_in(self._folder))), None))[0]

    def save(self, step: int, phase: str, parts: Mapping[str, Saved], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint after `step` optimizer steps, in `phase` of the next one ("" between steps)."""
        final = self._folder / str(StepName(step, phase))
        if self._exchange.any(final.exists()):
            return final
        partial = final.with_name(f".{final.name}")

        def write() -> None:
            if self._exchange.is_first:
                partial.mkdir(exist_ok=True)
                (partial / "state.json").write_text(json.dumps(state))

        self._together(write, final)
        for name, part in parts.items():
            self._together(lambda name=name, part=part: part.save(partial / name), final)  # type: ignore[misc]
        if self._exchange.is_first:
            _flush(partial)
            partial.rename(final)
            for _, old in steps_in(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        self._exchange.barrier()
        return final

    def load(self, path: Path, parts: Mapping[str, Saved]) -> dict[str, Any]:
        """Bring the parts to where `path` was written; its state."""
        for name, part in parts.items():
            part.load(path / name)
        return json.loads((path / "state.json").read_text())

    def _together(self, write: Callable[[], None], final: Path) -> None:
        """Run `write` in every process; if it fails anywhere, all fail with the reason of the first that has one of its own."""
        problem: tuple[bool, str] | None = None
        try:
            write()
        except (OSError, RuntimeError) as error:
            problem = (isinstance(error, PeerFailedError), f"{type(error).__name__}: {error}")
        found = [entry for entry in self._exchange.all_gather(problem) if entry is not None]
        problems = [text for _, text in sorted(found, key=lambda entry: entry[0])]
        if not problems:
            return
        free_gb = shutil.disk_usage(self._folder).free / 2**30
        last = self.latest()
        kept = f"The last complete checkpoint is {last}" if last else "There is no earlier checkpoint"
        raise CheckFailed(
            f"could not save {final} ({free_gb:.1f} GB free there): {problems[0]}. {kept}; make room and continue with "
            "--resume."
        )


def _flush(folder: Path) -> None:
    """Wait until the folder's files are on the disk: the rename must not survive a power cut that they do not."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
