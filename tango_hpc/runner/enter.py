"""The start of a run in a directory, in the foreground and at submission alike: all that comes before the first
attempt.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tango_hpc.base.config import Config, config_to_yaml
from tango_hpc.base.config.load import NOT_YAML, read_tree
from tango_hpc.base.config.paths import flatten, same_value
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_atomically
from tango_hpc.base.run.directory import RunDirectory, runs_below
from tango_hpc.base.run.summary import read_summary, update_summary
from tango_hpc.base.run.weights_alone import only_weights
from tango_hpc.runner.attempts import AttemptLog, newest_checkpoint, submitted_jobs
from tango_hpc.runner.continuity import ConfigChange, compare_with_last, refuse
from tango_hpc.runner.environment import Place, check_nodes
from tango_hpc.runner.lock import RunLock, take_lock
from tango_hpc.runner.program import Program
from tango_hpc.runner.provenance import note_changes
from tango_hpc.runner.queued import check_no_job_waits, never_started

# Mode of a new run directory: its files may show prompts, answers and paths.
PRIVATE = 0o750

# What may lie in a directory before a run itself starts there.
LAUNCHER_ENTRIES = frozenset({"logs", "control", "snapshot", "outcomes", "heartbeat"})


@dataclass
class Entry:
    """A run that this process has entered: its inputs are checked, and it holds the run's lock.

    `computes_with` has, by program, the part of its record in provenance.json that was already worked out.
    """

    directory: RunDirectory
    lock: RunLock
    computes_with: dict[str, dict[str, Any]]


def prepare_run(programs: Sequence[Program], config: Config, *, resume: bool) -> RunDirectory:
    """Check the inputs of all `programs`, make or enter the run directory, and write the data sets that are missing.

    Raises UserError for what is missing or in the way; then nothing has changed.
    """
    with prepared_run(programs, config, resume=resume) as entry:
        return entry.directory


@contextmanager
def prepared_run(
    programs: Sequence[Program], config: Config, *, resume: bool, where: Place | None = None
) -> Iterator[Entry]:
    """Do what `prepare_run` does and keep the lock, which is taken before anything is written.

    `where` is the place of the ranks if this process starts them: it must have enough nodes.
    """
    start = Start.check(programs, config, resume=resume)
    directory = start.directory
    if where is not None:
        check_nodes(config.launch, where)
    was_there = directory.path.exists()
    with _explaining_place(directory):
        directory.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        directory.control.mkdir(exist_ok=True)
        lock = take_lock(directory)
    try:
        if not start.is_current():  # another process entered the run before this one had the lock
            start = Start.check(programs, config, resume=resume)
        backup = RunBackup(directory, was_there=was_there)
        try:
            start.enter()
            # The user who starts a run wants it to run; only requests from now on count.
            directory.stop_file.unlink(missing_ok=True)
            for program in programs:
                if start.changes and is_done(directory, program.name):
                    update_summary(directory, program.name, "stopped")  # done under the old settings alone
                program.make_inputs(config)
        except BaseException:
            with suppress(OSError):  # of a full disk, which is why it is undone
                backup.restore()
            raise
        yield Entry(directory, lock, start.computes_with)
    finally:
        lock.release()


def check_run(programs: Sequence[Program], config: Config, *, resume: bool) -> None:
    """Raise UserError where `prepare_run` would; make nothing."""
    directory = Start.check(programs, config, resume=resume).directory
    nearest = next(folder for folder in (directory.path, *directory.path.parents) if folder.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(f"cannot write the run directory {directory.path}: {nearest} is no folder that you may write")


class RunBackup:
    """The state of a run directory before it is entered for something that may still be refused, such as a job."""

    def __init__(self, directory: RunDirectory, *, was_there: bool) -> None:
        self._directory = directory
        self._was_there = was_there
        self._jobs = submitted_jobs(directory)
        files = (directory.config, directory.provenance, directory.summary, directory.stop_file)
        self._files = {file: file.read_bytes() if file.is_file() else None for file in files}

    def restore(self) -> None:
        """Undo `prepare_run`: an old run gets its settings back, a new one is removed. Other people's jobs stay."""
        directory = self._directory
        if submitted_jobs(directory) != self._jobs or (not self._was_there and AttemptLog(directory).read()):
            return
        if not self._was_there:
            shutil.rmtree(directory.path, ignore_errors=True)
            return
        for file, content in self._files.items():
            if content is None:
                file.unlink(missing_ok=True)
            elif not file.is_file() or file.read_bytes() != content:
                write_atomically(file, content)
        if self._files[directory.config] is None:
            for folder in (directory.tensorboard, directory.rollouts, directory.checkpoints):
                with suppress(OSError):  # the folder does not exist, or holds a user's files
                    folder.rmdir()


@dataclass
class Start:
    """The start of `programs` with `config`, after all checks: nothing is written yet, and no lock is held."""

    directory: RunDirectory
    config_yaml: str
    config_before: bytes | None  # the run's config.yaml as it was checked
    num_attempts: int
    changes: list[ConfigChange]
    computes_with: dict[str, dict[str, Any]]

    @classmethod
    def check(cls, programs: Sequence[Program], config: Config, *, resume: bool) -> Start:
        """Check the place, the settings against those of the run, the inputs, and what a checkpoint was made from.

        What the run directory holds comes first, and then the inputs. Raises UserError for what is wrong.
        """
        check_run_dir(config.run.dir)
        start = cls(RunDirectory(config.run.dir), config_to_yaml(config), None, 0, [], {})
        if resume:
            check_there_is_a_run(start.directory)
        start.check_settings(programs[0].name, resume=resume)
        for number, program in enumerate(programs):
            program.check_inputs(config, after=programs[:number])
        for program in programs:
            if start.config_before is not None and not start.changes and is_done(start.directory, program.name):
                continue
            start._check_goes_on(program, config)
        return start

    def check_settings(self, program: str | None, *, resume: bool) -> None:
        """Compare the settings with those of the run in the directory, if it holds one."""
        _check_place(self.directory, resume=resume)
        if self.directory.config.is_file():
            self.config_before = self.directory.config.read_bytes()
            self.num_attempts = len(AttemptLog(self.directory).read())
            self.changes = _check_changes(self.directory, self.config_yaml, resume=resume, stage=program)

    def _check_goes_on(self, program: Program, config: Config) -> None:
        """Raise UserError where `program` would go on from its checkpoint and compute something else."""
        problem = only_weights(self.directory.checkpoints / program.name)
        if problem is not None:
            raise UserError(problem)
        if newest_checkpoint(self.directory, program.name) is not None:
            self.computes_with[program.name], refused = compare_with_last(self.directory, program, config)
            refuse(self.directory, refused)

    def is_current(self) -> bool:
        """Return whether the run's settings and attempts are still those that were checked."""
        file = self.directory.config
        settings = file.read_bytes() if file.is_file() else None
        return settings == self.config_before and len(AttemptLog(self.directory).read()) == self.num_attempts

    def enter(self) -> None:
        """Make the folders, write the settings, and keep their changes for the record of the next attempt."""
        directory = self.directory
        with _explaining_place(directory):
            _make_folders(directory)
            if self.config_before != self.config_yaml.encode():  # new settings, or the new place of a moved run
                write_atomically(directory.config, self.config_yaml)
        if self.changes:
            note_changes(directory, map(str, self.changes))


def check_run_dir(path: Path) -> None:
    """Raise UserError for a name with which a job would run other code, or write its logs elsewhere."""
    what = {":": "a colon, at which Python would split PYTHONPATH", "\\": "a backslash, which Slurm takes out of names"}
    found = [text for sign, text in what.items() if sign in str(path)]
    if any(not sign.isprintable() for sign in str(path)):
        found.append("a line break or another control character")
    if found:
        raise UserError(
            f"run.dir: {str(path)!r} holds {' and '.join(found)}; choose another name (dashes in times, say)"
        )


def check_there_is_a_run(directory: RunDirectory) -> None:
    """Raise UserError where there is nothing to resume, with the runs that lie near."""
    if directory.config.is_file():
        return
    path = directory.path
    nearest = next(folder for folder in path.parents if folder.is_dir())
    names = {str(run): run for run in runs_below(nearest, depth=2)}
    close = difflib.get_close_matches(str(path), names, n=5, cutoff=0.0)
    near = f"Runs near it: {', '.join(close)}" if close else f"There is no run near it, in {nearest}"
    raise UserError(
        f"there is no run to resume in {path}. {near}. Give the run.dir of a run, or its config.yaml; "
        "without --resume a new run starts"
    )


def is_done(directory: RunDirectory, stage: str) -> bool:
    """Return whether `stage` has run to its end there."""
    return read_summary(directory).get("stages", {}).get(stage, {}).get("status") == "done"


def enter_run(
    path: str | os.PathLike[str], resolved_config_yaml: str, *, resume: bool, stage: str | None = None
) -> tuple[RunDirectory, list[ConfigChange]]:
    """Make the run directory, or enter the run that it holds; return it with the changes of its settings.

    A new or empty directory is taken without `resume`. One that holds a run is taken
    - with `resume`, when the configurations differ in nothing but `CHANGEABLE_ON_RESUME`;
    - without it, when they are equal and `stage` has not been started there yet, so that the stages of one
      configuration (fine-tuning, then reinforcement learning) share a directory;
    - whatever differs, when a job was submitted there, but none has started, waits or runs.
    Raises UserError otherwise, and where the directory cannot be written.
    """
    start = Start(RunDirectory(path), resolved_config_yaml, None, 0, [], {})
    start.check_settings(stage, resume=resume)
    start.enter()
    return start.directory, start.changes


def _check_place(directory: RunDirectory, *, resume: bool) -> None:
    """Raise UserError for a folder that is no run, and for a run to resume that is not there. Writes nothing."""
    if directory.config.is_file():
        return
    try:
        strangers = sorted({entry.name for entry in directory.path.iterdir()} - LAUNCHER_ENTRIES)
    except OSError:  # missing, or not readable: the first write there will raise
        strangers = []
    if strangers:
        raise UserError(
            f"{directory.path} is not empty and is not a run (it holds {', '.join(strangers[:5])}). "
            "Choose another directory with run.dir=PATH."
        )
    if resume:
        check_there_is_a_run(directory)


@contextmanager
def _explaining_place(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the run directory {directory.path}: {error.strerror or error}. "
            "Choose one on a file system that you can write, with space left, with run.dir=PATH."
        ) from error


def _make_folders(directory: RunDirectory) -> None:
    directory.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    for folder in (directory.tensorboard, directory.rollouts, directory.checkpoints, directory.logs):
        folder.mkdir(exist_ok=True)
    for folder in (directory.control, directory.outcomes, directory.heartbeats):
        folder.mkdir(exist_ok=True)
    descriptor, probe = tempfile.mkstemp(dir=directory.path, prefix=".writable-")
    os.close(descriptor)
    os.unlink(probe)


def _check_changes(
    directory: RunDirectory, resolved_config_yaml: str, *, resume: bool, stage: str | None
) -> list[ConfigChange]:
    _check_whole(directory)
    changes = changes_of_run(directory, resolved_config_yaml)
    if changes and never_started(directory):
        check_no_job_waits(directory)
        return changes
    if not resume:
        started = {attempt.stage for attempt in AttemptLog(directory).read()}  # summary.json may be damaged
        started.update(read_summary(directory).get("stages", {}))
        if not changes and stage is not None and stage not in started:
            return []
        difference = f" Its configuration differs in:{_listed(changes)}" if changes else ""
        raise UserError(
            f"{directory.path} already holds a run. Continue it with --resume, or choose another directory with "
            f"run.dir=PATH.{difference}"
        )
    refused = [change for change in changes if not change.allowed]
    if refused:
        raise UserError(
            f"{directory.path} cannot be resumed with these settings changed:{_listed(refused)}\n"
            "Give them their old values, or start a new run with run.dir=PATH."
        )
    return changes


def _check_whole(directory: RunDirectory) -> None:
    """Raise UserError where a run's config.yaml is damaged: nothing else says what the run computes."""
    try:
        whole = isinstance(yaml.safe_load(directory.config.read_text(encoding="utf-8")), Mapping)
    except NOT_YAML:  # nor UTF-8
        whole = False
    if not whole:
        raise UserError(
            f"{directory.config} is damaged: it holds no settings. Bring it back from a copy (the report of the run "
            "shows it), or start a new run with run.dir=PATH."
        )


def _listed(changes: Sequence[ConfigChange]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def changes_of_run(directory: RunDirectory, resolved_config_yaml: str) -> list[ConfigChange]:
    """Return the differences between a configuration and that of the existing run."""
    before = read_tree(directory.config)
    with suppress(ValidationError):  # an old setting or a user's own value: compared as it stands
        before = yaml.safe_load(config_to_yaml(Config.model_validate(before)))  # what came later has its default
    found = config_changes(before, yaml.safe_load(resolved_config_yaml))
    return [change for change in found if change.key != "run.dir"]  # it is this very directory, by whatever name


def config_changes(before_tree: Mapping[str, Any], after_tree: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the settings in which two configurations differ, by dotted key."""
    before, after = flatten(before_tree), flatten(after_tree)
    changes = [ConfigChange(key, before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]
    return [change for change in changes if not same_value(change.before, change.after)]
