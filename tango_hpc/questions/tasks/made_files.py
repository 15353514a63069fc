"""The data files that a configuration names and that its task makes where they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.questions.data.tables import check_made_with
from tango_hpc.questions.tasks.last_letter_files import last_letter_recipes
from tango_hpc.questions.tasks.own import own_recipes


class Recipe(Protocol):
    """A recipe of a file: the same recipe, the same rows."""

    def made_with(self) -> dict[str, Any]:
        """Return all that its content depends on, as the file carries it; JSON."""
        ...

    def write(self, path: Path) -> None:
        """Make the rows and write them, whole or not at all."""
        ...


def recipes(config: Config) -> Mapping[Path, Recipe]:
    """Return the files that the task can make."""
    return own_recipes(config) if config.task.file is not None else last_letter_recipes(config)


def check_made_files(config: Config) -> list[str]:
    """Return a message for each existing file that was made with other settings than the config's."""
    problems = []
    for path, recipe in recipes(config).items():
        try:
            check_made_with(path, recipe.made_with(), "task or seed")
        except UserError as error:
            problems.append(str(error))
    return problems


def make_missing_files(config: Config) -> None:
    """Write those that are not there yet; the same seed, the same files."""
    for path, recipe in recipes(config).items():
        if not path.exists():
            recipe.write(path)
