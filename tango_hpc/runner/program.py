"""The runner's view of what it runs: a program with roles on ranks, inputs, and results that show progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from rich.console import Console

from tango_hpc.base.config import Config
from tango_hpc.base.run.directory import RunDirectory


class View(Protocol):
    """A display of a run in a terminal."""

    def refresh(self) -> None:
        """Show what is new."""

    def finish(self) -> None:
        """Show the last state of the run."""


class Program(Protocol):
    """A program that the runner starts on ranks, one process for each of its roles on every rank.

    A stage of training is one (`stages.stage.Stage`); the tests of the runner use a counter.
    """

    name: str  # as on the command line, in summary.json and in the names of checkpoints' folders
    saves: str  # what an attempt leaves when it has made progress: "checkpoint" or "result"
    rank_module: str  # `python -m RANK_MODULE RUN_DIR NAME` is a task
    job_module: str  # `python -m JOB_MODULE RUN_DIR NAMES` is a batch job

    def roles(self, config: Config) -> list[str]:
        """Return the roles that have a process on each rank."""

    def inputs(self, config: Config) -> Iterable[tuple[str, Path]]:
        """Return the files and folders that the program computes from, by the key that names each in the config."""

    def check_inputs(self, config: Config, after: Sequence[Program] = ()) -> None:
        """Raise one `UserError` with all that is wrong with the inputs.

        What the programs of `after` write need not exist yet.
        """

    def make_inputs(self, config: Config) -> None:
        """Write the inputs that are made from the config and do not exist yet."""

    def check_disk(self, directory: RunDirectory, config: Config) -> str | None:
        """Return a warning where the disk will be too small; raise `UserError` where not one result fits."""

    def progress(self, directory: RunDirectory) -> str | None:
        """Return a description of what is saved, which changes when more is saved; None where nothing is."""

    def has_more_to_do(self, config: Config) -> bool:
        """Return whether a program that is done has got new inputs since."""

    def view(self, directory: RunDirectory, console: Console) -> AbstractContextManager[View]:
        """Return the display of a run of this program."""
