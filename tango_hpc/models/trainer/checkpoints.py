"""Checkpoints: everything that a stage needs to go on, complete or not there at all.

RUN/checkpoints/STAGE/
  step_000012/             after 12 optimizer steps
    generator/ verifier/   weights, optimizer, learning-rate step (Megatron's distributed checkpoint format);
                           __N_weights.distcp and __N_training.distcp are what rank N wrote
    state.json             counters, sampler, moving averages, and what an unfinished step had computed so far
    manifest.json          size and checksum of every file (base/run/manifest.py)
  step_000012+rollout/     the same weights, and the rollouts of step 13
  step_000004/             too old for `checkpoint.keep`: weights alone (base/run/weights_alone.py)
  step_000016.damaged/     what was found damaged when the run went on: set aside, never deleted

A checkpoint is written under a name that begins with a dot and renamed when every process has written its part and the
manifest is there, so a full disk, a kill or a crash while saving leaves the last complete one as it was. In between,
training may go on (`save(background=True)`, then `complete`). What is read is verified first.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial as partial_call
from pathlib import Path
from typing import Any, Protocol

from tango_hpc.base.config.schema import CheckpointConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.files import flush_to_disk, remedy_in, set_aside, warn_once
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.manifest import (
    FileSum,
    listed,
    read_manifest,
    sum_of,
    total_bytes,
    write_manifest,
    wrong_contents,
    wrong_sizes,
)
from tango_hpc.base.run.step_names import StepName, leftovers_in, steps_in
from tango_hpc.base.run.summary import note_resumed_from
from tango_hpc.base.run.weights_alone import STATE, is_whole, keep_weights, only_weights, remove_training, whole_in
from tango_hpc.models.parallel.exchange import Exchange, PeerFailedError

# NFS shows what another node has written up to a minute late.
VISIBLE_SECONDS = 60.0
POLL_SECONDS = 0.5


class Saved(Protocol):
    """A part of a checkpoint with a folder of its own: a `Policy`, or a `Role` with one. Every method is collective."""

    def begin_save(self, folder: Path, *, background: bool) -> None:
        """Write the folder, or begin to."""

    def is_written(self) -> bool:
        """Return whether `end_save` need not wait for this process."""
        ...

    def end_save(self) -> Mapping[str, FileSum]:
        """Wait for it; the sums of those files for which this process knows them, by their name there."""

    def load(self, folder: Path) -> None: ...


class Checkpoints:
    """The checkpoints of one stage. Its methods are collective over all processes; the first does the housekeeping.

    `kept` says how many stay whole, and of how many steps before these the weights. `set_aside` says in words what
    `latest` has found damaged.
    """

    def __init__(self, directory: RunDirectory, stage: str, kept: CheckpointConfig, exchange: Exchange) -> None:
        self._directory, self._stage = directory, stage
        self._folder = directory.checkpoints / stage
        self._kept, self._exchange = kept, exchange
        self.set_aside: list[str] = []
        # What is being written: its name to be, the parts that are not ended, sums of those that are.
        self._begun: tuple[Path, dict[str, Saved], dict[str, FileSum]] | None = None
        if exchange.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in leftovers_in(self._folder):
                self._remove(leftover)
            for _, path in steps_in(self._folder):
                if not is_whole(path):
                    remove_training(path)
        exchange.barrier()

    def latest(self) -> Path | None:
        """Return the newest intact checkpoint, as the first process sees the folder; None where there are none at all.

        Damaged ones that are newer are set aside. Raises `CheckFailed` where all are damaged, or weights alone: nothing
        is begun anew in the place of what was lost.
        """
        self.complete()
        damaged: dict[Path, str] = {}
        newest: Path | None = None
        found = [path for _, path in reversed(whole_in(self._folder))]
        whole, problem = self._exchange.all_gather((found, only_weights(self._folder)))[0]
        if problem is not None:
            raise CheckFailed(problem)
        for path in whole:
            problem = find_damage(path, self._exchange)
            if problem is None:
                newest = path
                break
            damaged[path] = problem
        if damaged and newest is None:
            what = "".join(f"\n  {path.name}: {problem}" for path, problem in damaged.items())
            raise CheckFailed(
                f"no checkpoint in {self._folder} that a run can go on from is intact:{what}\nBring the files back from"
                " a copy, or begin again in another directory with run.dir=PATH."
            )
        for path, problem in damaged.items():
            assert newest is not None
            aside = set_aside(path).name if self._exchange.is_first else ""
            aside = self._exchange.all_gather(aside)[0]
            self.set_aside.append(
                f"checkpoint {path.name} is damaged ({problem}): set aside as {aside}; the run goes on from"
                f" {newest.name}"
            )
        if damaged and newest is not None and self._exchange.is_first:
            note_resumed_from(self._directory, self._stage, newest.name)
        return newest

    def save(
        self, step: int, phase: str, parts: Mapping[str, Saved], state: Mapping[str, Any], *, background: bool = False
    ) -> None:
        """Write a checkpoint after `step` optimizer steps, in `phase` of the next one ("" between steps).

        In the background `complete` must follow; what the parts hold is copied before this returns. Raises
        `CheckFailed` where it, or the one before it, could not be written.
        """
        self.complete()
        final = self._folder / str(StepName(step, phase))
        if self._exchange.any(final.exists() and is_whole(final)):
            return
        partial = _partial(final)

        def write() -> None:
            if self._exchange.is_first:
                partial.mkdir(exist_ok=True)
                (partial / STATE).write_text(json.dumps(state))

        self._together(write, final)
        self._begun = (final, dict(parts), {})
        for name, part in parts.items():
            begin = partial_call(part.begin_save, partial / name, background=background)
            self._together(begin, final)
            if not background:
                self._end_part(name)
        if not background:
            self.complete()

    def complete(self, *, wait: bool = True) -> None:
        """Finish the checkpoint that was begun, if there is one; without `wait` only if it is already written."""
        if self._begun is None:
            return
        final, parts, sums = self._begun
        if not wait and self._exchange.any(not all([part.is_written() for part in parts.values()])):
            return
        for name in list(parts):
            self._end_part(name)
        self._begun = None
        known = {name: entry for found in self._exchange.all_gather(sums) for name, entry in found.items()}
        self._together(lambda: self._give_name(final, known) if self._exchange.is_first else None, final)
        if self._exchange.is_first:
            self._let_go_of_the_oldest()
        self._exchange.barrier()

    def _let_go_of_the_oldest(self) -> None:
        """Delete checkpoints that are too old to stay whole, but for the weights of as many steps as are wanted."""
        saved = steps_in(self._folder)
        whole = [path for _, path in whole_in(self._folder)]
        staying = whole[-self._kept.keep :]
        steps = {name.step for name, path in saved if path in staying}
        left = self._kept.keep_weights
        for name, path in reversed(saved):
            if path in staying:
                continue
            if name.step in steps or not left:  # one written within a step has the weights of the one before the step
                self._remove(path)
                continue
            steps.add(name.step)
            left -= 1
            if path in whole:
                try:
                    keep_weights(path)
                except (OSError, ValueError) as error:
                    warn_once(f"{path} could not be turned into weights alone: {error}")

    def _end_part(self, name: str) -> None:
        assert self._begun is not None
        final, parts, sums = self._begun
        part = parts.pop(name)

        def end() -> None:
            sums.update({f"{name}/{file}": entry for file, entry in part.end_save().items()})

        self._together(end, final)

    def load(self, path: Path, parts: Mapping[str, Saved]) -> dict[str, Any]:
        """Bring the parts to where `path` was written; its state."""
        for name, part in parts.items():
            part.load(path / name)
        return json.loads((path / STATE).read_text())

    def _give_name(self, final: Path, known: Mapping[str, FileSum]) -> None:
        """Add the manifest, and give the checkpoint its name once all of it is on the disk."""
        partial = _partial(final)
        _flush(partial)
        files = {str(path.relative_to(partial)): path for path in partial.rglob("*") if path.is_file()}
        sums = {name: sum_of(path) for name, path in files.items() if name not in known} | dict(known)
        wrong = listed(wrong_sizes(partial, sums))
        if wrong is not None:
            raise OSError(f"the file system has not kept what was written: {wrong}")
        write_manifest(partial, sums)
        flush_to_disk(partial)
        if final.exists():  # weights alone, of a run that has gone on from an older checkpoint
            self._remove(final)
        partial.rename(final)
        flush_to_disk(final.parent)

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint; a half-deleted one has a name that no code takes for a checkpoint.

        No save takes that name either: NFS keeps files that a process has open.
        """
        hidden = path.with_name(f".step_left-{uuid.uuid4().hex}")
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:  # a process reads it over NFS, say; the next start removes it
            warn_once(f"{path} could not be removed wholly: {error}")

    def _together(self, write: Callable[[], None], final: Path) -> None:
        """Run `write` in every process; if it fails anywhere, all fail with the reason of the first that has one of its
        own.

        What was written so far is then removed: on a full disk everybody else needs the room.
        """
        problem: tuple[bool, str] | None = None
        try:
            write()
        except (OSError, PeerFailedError) as error:  # after others a process is not at one place with its peers
            problem = (isinstance(error, PeerFailedError), f"{type(error).__name__}: {error}")
        found = [entry for entry in self._exchange.all_gather(problem) if entry is not None]
        problems = [text for _, text in sorted(found, key=lambda entry: entry[0])]
        if not problems:
            return
        self._begun = None
        free_gb = shutil.disk_usage(self._folder).free / 2**30
        if self._exchange.is_first:
            shutil.rmtree(_partial(final), ignore_errors=True)
        newest = next((path for _, path in reversed(whole_in(self._folder))), None)
        last = self._exchange.all_gather(newest)[0]
        kept, needed = "There is no earlier checkpoint", ""
        if last is not None:
            kept, size = f"The last complete checkpoint is {last}", total_bytes(last)
            needed = f", the last one took {size / 2**30:.3g} GB" if size is not None else ""
        raise CheckFailed(
            f"could not save {final} ({free_gb:.1f} GB free there{needed}): {problems[0]}. {kept}; "
            f"{remedy_in(problems[0])} and continue with --resume."
        )


def _partial(final: Path) -> Path:
    """Return the folder of a checkpoint until it is complete."""
    return final.with_name(f".{final.name}")


def find_damage(path: Path, exchange: Exchange, wanted: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return the fault of the checkpoint `path`, or of its `wanted` files; None where they are intact. Collective.

    The first process compares names and sizes; each then reads what it is likely to load.
    """
    sums: dict[str, FileSum] = {}
    problem: str | None = None
    if exchange.is_first:
        try:
            sums = {name: entry for name, entry in read_manifest(path).items() if wanted(name)}
            problem = listed(wrong_sizes(path, sums))
        except ValueError as error:
            problem = str(error)
    problem, sums = exchange.all_gather((problem, sums))[0]
    if problem is not None:
        return problem
    mine = {name: entry for name, entry in sums.items() if _reader_of(name, exchange) == exchange.number}
    visible_by = time.monotonic() + VISIBLE_SECONDS
    while not all((path / name).exists() for name in mine) and time.monotonic() < visible_by:
        time.sleep(POLL_SECONDS)
    found = exchange.all_gather(list(wrong_contents(path, mine)))
    return listed(problem for of_process in found for problem in of_process)


def _reader_of(name: str, exchange: Exchange) -> int:
    """Return the number of the process that reads a file when the layout is still the one that wrote it."""
    part, _, file = name.partition("/")
    world_size = exchange.size // len(exchange.roles)
    written_by = re.match(r"__(\d+)_", file)
    first = exchange.roles.index(part) * world_size if part in exchange.roles else 0
    return first + (int(written_by[1]) % world_size if written_by else 0)


def _flush(folder: Path) -> None:
    """Wait until the folder's files are on the disk: the rename must not survive a power cut that they do not."""
    for path in (*folder.rglob("*"), folder):
        flush_to_disk(path)
