"""What comes before the first attempt, in the foreground and at submission alike: the rules for starting in a directory."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from tango_hpc.questions.tasks.made_files import make_missing_files
from tango_hpc.runner.attempts import AttemptLog, newest_checkpoint, submitted_jobs
from tango_hpc.runner.continuity import ConfigChange, compare_with_last, refuse
from tango_hpc.runner.environment import Place, check_nodes
from tango_hpc.runner.lock import RunLock, take_lock
from tango_hpc.runner.provenance import note_changes
from tango_hpc.runner.queued import check_no_job_waits, never_started
from tango_hpc.stages.preflight import check_inputs

# Mode of a new run directory: its files may show prompts, answers and paths.
PRIVATE = 0o750

# What may lie in a directory before a run itself starts there.
LAUNCHER_ENTRIES = frozenset({"logs", "control", "snapshot", "outcomes", "heartbeat"})


def prepare_run(stages: Sequence[str], config: Config, *, resume: bool) -> RunDirectory:
    """Check the inputs of all `stages`, make or enter the run directory, and write data sets that are made, not found.

    Raises UserError for what is missing or in the way.
    """
    with prepared_run(stages, config, resume=resume) as (directory, _):
        return directory


@contextmanager
def prepared_run(
    stages: Sequence[str], config: Config, *, resume: bool, where: Place | None = None
) -> Iterator[tuple[RunDirectory, RunLock]]:
    """`prepare_run` for whoever goes on to run it: with the lock, which is held from before anything is written.

    `where` the ranks are to be started, if by this very process: there must be nodes enough.
    """
    directory = _check_start(stages, config, resume=resume)
    if where is not None:
        check_nodes(config.launch, where)
    was_there = directory.path.exists()
    with _explaining_place(directory):
        directory.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        directory.control.mkdir(exist_ok=True)
        lock = take_lock(directory)
    try:
        _check_goes_on(directory, stages, config)
        before = Before(directory, was_there=was_there)
        try:
            _, changes = enter_run(directory.path, config_to_yaml(config), resume=resume, stage=stages[0])
            # Who starts it wants it to run; what is asked from now on counts.
            directory.stop_file.unlink(missing_ok=True)
            for stage in stages:
                if changes and is_done(directory, stage):
                    update_summary(directory, stage, "stopped")  # done under the old settings, not under the new ones
            make_missing_files(config)
        except BaseException:
            with suppress(OSError):  # of a full disk, which is why it is undone
                before.bring_back()
            raise
        yield directory, lock
    finally:
        lock.release()


class Before:
    """What a run directory was before it was entered for what may still be refused: a job by Slurm, say."""

    def __init__(self, directory: RunDirectory, *, was_there: bool) -> None:
        self._directory = directory
        self._was_there = was_there
        self._jobs = submitted_jobs(directory)
        files = (directory.config, directory.provenance, directory.summary, directory.stop_file)
        self._files = {file: file.read_bytes() if file.is_file() else None for file in files}

    def bring_back(self) -> None:
        """Undo `prepare_run`: a run has the settings of before again, a new one is gone. Jobs of others are left alone."""
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
                with suppress(OSError):  # it is not there, or somebody's files are
                    folder.rmdir()


def check_run(stages: Sequence[str], config: Config, *, resume: bool) -> None:
    """Raise UserError where `prepare_run` would; makes nothing."""
    directory = _check_start(stages, config, resume=resume)
    _check_goes_on(directory, stages, config)
    nearest = next(folder for folder in (directory.path, *directory.path.parents) if folder.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise UserError(f"cannot write the run directory {directory.path}: {nearest} is no folder that you may write")


def _check_start(stages: Sequence[str], config: Config, *, resume: bool) -> RunDirectory:
    """The run's directory, after all that can be checked without the lock; what a run there is comes before its data."""
    check_run_dir(config.run.dir)
    directory = RunDirectory(config.run.dir)
    if resume:
        check_there_is_a_run(directory)
    _check_place(directory, resume=resume)
    if directory.config.is_file():
        _check_changes(directory, config_to_yaml(config), resume=resume, stage=stages[0])
    for number, stage in enumerate(stages):
        check_inputs(config, stage, after=stages[:number])
    return directory


def _check_goes_on(directory: RunDirectory, stages: Sequence[str], config: Config) -> None:
    """Raise UserError where a stage that is to go on from its checkpoint would compute something else."""
    changed = directory.config.is_file() and bool(changes_of_run(directory, config_to_yaml(config)))
    for stage in stages:
        if not changed and is_done(directory, stage):
            continue
        problem = only_weights(directory.checkpoints / stage)
        if problem is not None:
            raise UserError(problem)
        if newest_checkpoint(directory, stage) is not None:
            refuse(directory, compare_with_last(directory, stage, config)[1])


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
    """Whether `stage` has run to its end there."""
    return read_summary(directory).get("stages", {}).get(stage, {}).get("status") == "done"


def enter_run(
    path: str | os.PathLike[str], resolved_config_yaml: str, *, resume: bool, stage: str | None = None
) -> tuple[RunDirectory, list[ConfigChange]]:
    """Make the run directory, or enter the one that is there; return it with the changes of its settings.

    A new or empty directory is taken without `resume`. One that holds a run is taken
    - with `resume`, when the configurations differ in nothing but `CHANGEABLE_ON_RESUME`;
    - without it, when they are equal and `stage` has not been started there yet, so that the stages of one
      configuration (fine-tuning, then reinforcement learning) share a directory;
    - whatever differs, when a job was submitted there, but none has started, waits or runs.
    Raises UserError otherwise, and where the directory cannot be written.
    """
    directory = RunDirectory(path)
    _check_place(directory, resume=resume)
    with _explaining_place(directory):
        _make_folders(directory)
        if not directory.config.exists():
            write_atomically(directory.config, resolved_config_yaml)
            return directory, []
    changes = _check_changes(directory, resolved_config_yaml, resume=resume, stage=stage)
    if directory.config.read_text(encoding="utf-8") != resolved_config_yaml:  # new settings, or where a moved run lies
        write_atomically(directory.config, resolved_config_yaml)
    if changes:
        note_changes(directory, map(str, changes))
    return directory, changes


def _check_place(directory: RunDirectory, *, resume: bool) -> None:
    """Raise UserError for a folder of somebody else, and for a run to resume that is not there. Writes nothing."""
    if directory.config.is_file():
        return
    try:
        strangers = sorted({entry.name for entry in directory.path.iterdir()} - LAUNCHER_ENTRIES)
    except OSError:  # not there yet, or not to be read, which whoever writes there will find
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
    """In what a configuration differs from that of the run which is there."""
    before = read_tree(directory.config)
    with suppress(ValidationError):  # then as it stands: a setting that there was, or a value that somebody has put in
        before = yaml.safe_load(config_to_yaml(Config.model_validate(before)))  # what came later has its default
    found = config_changes(before, yaml.safe_load(resolved_config_yaml))
    return [change for change in found if change.key != "run.dir"]  # it is this very directory, by whatever name


def config_changes(before_tree: Mapping[str, Any], after_tree: Mapping[str, Any]) -> list[ConfigChange]:
    """The settings in which two configurations differ, by dotted key."""
    before, after = flatten(before_tree), flatten(after_tree)
    changes = [ConfigChange(key, before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]
    return [change for change in changes if not same_value(change.before, change.after)]
