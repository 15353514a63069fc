"""A run's own copies of the files of its method (`RUN/method`): what a resumed run computes by."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tango_hpc.base.config import Config
from tango_hpc.base.config.hooks import HookConfig
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.method.hooks import check_hook, load_hook
from tango_hpc.runner.attempts import newest_checkpoint

_STAGE = "train"  # which computes by them


def hooks_of(config: Config) -> Iterator[HookConfig]:
    """Yield the files of the method that training calls."""
    yield config.algorithm.loss
    if config.algorithm.correction is not None:
        yield config.algorithm.correction


def kept_file(config: Config, hook: HookConfig) -> Path:
    """Return the file that training reads: the run's copy of a user's, or the shipped one."""
    return RunDirectory(config.run.dir).method / f"{hook.kind()}.py" if hook.is_own else hook.file


def check_method(config: Config) -> None:
    """Load the files that training will read, and try the user's. Raises UserError for a mistake."""
    for hook in hooks_of(config):
        loaded = load_hook(hook, kept_file(config, hook) if _goes_on(config) else None)
        if hook.is_own:
            check_hook(loaded)


def keep_method(config: Config) -> None:
    """Copy the user's files into the run, unless it goes on from a checkpoint."""
    for hook in hooks_of(config):
        if hook.is_own and not _goes_on(config):
            copy = kept_file(config, hook)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(hook.file, copy)


def changed_files(config: Config) -> list[str]:
    """Return what to say of the user's files that are no longer as the run has them."""
    return [
        f"algorithm.{hook.kind()}: {hook.file} has changed or is gone; this run goes on by its copy, {copy}"
        for hook in hooks_of(config)
        if hook.is_own
        and (not hook.file.is_file() or hook.file.read_bytes() != (copy := kept_file(config, hook)).read_bytes())
    ]


def _goes_on(config: Config) -> bool:
    return newest_checkpoint(RunDirectory(config.run.dir), _STAGE) is not None
