"""A run's own copies of the files of its method (`RUN/method`): what a resumed run computes by."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from tango_hpc.base.config import Config
from tango_hpc.base.config.hooks import KEYS, HookConfig
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.method.hooks import AdvantagesHook, check_advantages, check_token_hook, kept_file, load_hook
from tango_hpc.runner.attempts import newest_checkpoint

_STAGE = "train"  # which computes by them


def hooks_of(config: Config) -> Iterator[HookConfig]:
    """Yield the files of the method that training calls."""
    algorithm = config.algorithm
    yield algorithm.loss
    if algorithm.correction is not None:
        yield algorithm.correction
    yield algorithm.advantages.generator
    if config.verifier is not None:
        yield algorithm.advantages.verifier


def load_advantages(config: Config, role: str, *, kept: bool = True) -> AdvantagesHook:
    """Return the advantages of `role`, by the run's copy unless `kept` is false. Raises UserError for a mistake."""
    hook = getattr(config.algorithm.advantages, role)
    return load_hook(hook, kept_file(config.run.dir, hook) if kept else None)


def check_method(config: Config) -> None:
    """Load the files that training will read, and try them. Raises UserError for a mistake."""
    goes_on = _goes_on(config)
    for hook in hooks_of(config):
        loaded = load_hook(hook, kept_file(config.run.dir, hook) if goes_on else None)
        if isinstance(loaded, AdvantagesHook):
            check_advantages(
                loaded,
                rollouts=config.train.rollouts_per_question,
                alpha=config.algorithm.alpha_start if config.verifier is not None else 0.0,
                judged=config.verifier is not None,
            )
        elif hook.is_own:  # which takes a while: it loads torch
            check_token_hook(loaded)


def keep_method(config: Config) -> None:
    """Copy the user's files into the run, unless it goes on from a checkpoint."""
    if _goes_on(config):
        return
    for hook in hooks_of(config):
        if hook.is_own:
            copy = kept_file(config.run.dir, hook)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(hook.file, copy)


def changed_files(config: Config) -> list[str]:
    """Return what to say of the user's files that are no longer as the run has them."""
    notes = []
    for hook in hooks_of(config):
        copy = kept_file(config.run.dir, hook)
        if hook.is_own and not (hook.file.is_file() and hook.file.read_bytes() == copy.read_bytes()):
            key = KEYS[hook.kind]
            notes.append(f"{key}: {hook.file} has changed or is gone; this run goes on by its copy, {copy}")
    return notes


def _goes_on(config: Config) -> bool:
    return newest_checkpoint(RunDirectory(config.run.dir), _STAGE) is not None
