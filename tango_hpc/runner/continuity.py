"""The settings and inputs of an attempt, and their differences from the attempt before.

A run that goes on from a checkpoint must have the data, models and prompts that it began with, by their contents.
Settings that decide what is computed must be those of before, also where a user has edited the run's own config.yaml.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.config.paths import flatten, moved, same_value
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.fingerprint import fingerprint
from tango_hpc.base.run.summary import read_provenance
from tango_hpc.runner.attempts import newest_checkpoint
from tango_hpc.runner.program import Program

# Settings that a resumed run may change: they decide where, how fast and how long it runs, not what it computes.
# A longer run also stretches the schedules of alpha and of the learning rate from the resumed step on.
CHANGEABLE_ON_RESUME = (
    "run.*",
    "launch.nodes",
    "launch.tasks_per_node",
    "launch.device",
    "launch.threads_per_rank",
    "launch.*_seconds",
    "launch.max_attempts_without_progress",
    "launch.stopped_exit_code",
    "train.generator_steps",
    "train.eval_every",
    "train.dump_every",
    "train.max_logprob_gap",
    "train.on_trouble.*",
    "train.max_rollbacks",
    "sft.*.steps",
    "sft.*.eval_every",
    "checkpoint.*",
    "reshard.*",
    "*.rollout.*",
    "*.parallel.*",
    "*.micro_batch_tokens",
    "*.recompute",
)


@dataclass(frozen=True)
class ConfigChange:
    """One setting that differs between two configurations; a missing one is None."""

    key: str
    before: Any
    after: Any

    @property
    def allowed(self) -> bool:
        """Return whether a resumed run may make this change."""
        return any(fnmatch.fnmatchcase(self.key, pattern) for pattern in CHANGEABLE_ON_RESUME)

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


def compare_with_last(directory: RunDirectory, program: Program, config: Config) -> tuple[dict[str, Any], list[str]]:
    """Return this attempt's settings and inputs, as provenance.json records them, and the changes that are refused.

    Keys: `settings` (by dotted key), `inputs` (by the key that names them: path, files, size and checksum),
    `resumed_from`, `changes` since the last attempt of the stage, `refused`. Raises UserError for an input that is
    there and cannot be read.
    """
    attempts = read_provenance(directory)["attempts"]
    earlier = [
        entry for entry in attempts if entry["stage"] == program.name and _is_whole(entry) and not entry["refused"]
    ]
    last = earlier[-1] if earlier else {}
    known = {
        name: found for entry in earlier for named in entry["inputs"].values() for name, found in named["files"].items()
    }
    settings = flatten(config.model_dump(mode="json"))
    inputs = {}
    for key, path in program.inputs(config):
        try:
            if path.exists():
                inputs[key] = fingerprint(path, known)
        except OSError as error:
            raise UserError(
                f"{error.filename or path} cannot be read: {error.strerror}; make it readable for you"
            ) from None
    resumed_from = newest_checkpoint(directory, program.name)
    known_settings = last.get("settings", {})
    lay_in = Path(known_settings.get("run.dir", directory.path))
    edited = [
        ConfigChange(key, before, settings[key])
        for key, before in known_settings.items()
        if key in settings and key != "run.dir" and not same_value(moved(before, lay_in, directory.path), settings[key])
    ]
    replaced = [
        f"{key} ({now['path']}): {_described(before)} -> {_described(now)}"
        for key, now in inputs.items()
        if (before := last.get("inputs", {}).get(key)) is not None and _described(before) != _described(now)
    ]
    refused = [*(str(change) for change in edited if not change.allowed), *replaced] if resumed_from else []
    entry = {
        "settings": settings,
        "inputs": inputs,
        "resumed_from": resumed_from,
        "changes": [*map(str, edited), *replaced],
        "refused": bool(refused),
    }
    return entry, refused


def refuse(directory: RunDirectory, refused: list[str]) -> None:
    """Raise UserError where something is not as it must be."""
    if refused:
        listed = "".join(f"\n  {line}" for line in refused)
        raise UserError(
            f"{directory.path} cannot go on from its checkpoint, because it would compute something else:{listed}\n"
            "Bring back what was there before, or start a new run with run.dir=PATH."
        )


def _is_whole(entry: Mapping[str, Any]) -> bool:
    """Return whether an attempt's entry says what it computed with: not one of before there was such, or with damage in
    it.
    """
    inputs, settings = entry.get("inputs"), entry.get("settings")
    if not (isinstance(inputs, Mapping) and isinstance(settings, Mapping) and isinstance(entry.get("refused"), bool)):
        return False
    if not isinstance(settings.get("run.dir", ""), str):
        return False
    listed = [named.get("files") if isinstance(named, Mapping) else None for named in inputs.values()]
    return all(
        isinstance(files, Mapping)
        and all(
            isinstance(found, Mapping) and all(isinstance(found.get(key), int) for key in ("size", "mtime_ns", "crc32"))
            for found in files.values()
        )
        for files in listed
    )


def _described(entry: Mapping[str, Any]) -> str:
    """Return the contents of an input in few words, whatever it is called and wherever it lies."""
    files = {Path(name).name: found for name, found in entry["files"].items()}
    single = next(iter(files.values()))["crc32"] if len(files) == 1 else None
    contents = repr([(name, found["size"], found["crc32"]) for name, found in sorted(files.items())])
    checksum = zlib.crc32(contents.encode()) if single is None else single
    return f"{sum(found['size'] for found in files.values()):,} bytes, checksum {checksum:08x}"
