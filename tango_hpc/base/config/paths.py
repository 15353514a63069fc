"""The paths of a configuration: every path is absolute, and a run that was moved takes its own paths along."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Tag

NO_TEMPLATE_FILE = ("auto", "none")  # what `chat_template` may be beside a path


def absolute(path: Path) -> Path:
    """Return `path` from the working directory, with ~ expanded; links are not resolved."""
    path = Path(os.path.expanduser(path)).absolute()
    return path.resolve() if ".." in path.parts else path


def seen_from_run(tree: dict[str, Any], home: Path, model: type[BaseModel]) -> dict[str, Any]:
    """Return the settings of a run's own config.yaml, of a `model`, as they are to be read where it lies now, in
    `home`.

    What lay in the run directory lies in `home`. What lay elsewhere stays there, unless it is there no more and did
    move along with the run (a whole project that was moved). Relative paths, which earlier releases wrote, are seen
    from the folder in which the run was started, if `home` tells which that was, else from the working directory.
    """
    section = tree.get("run")
    before = Path(section["dir"]) if isinstance(section, dict) and isinstance(section.get("dir"), str) else home
    if not before.is_absolute():
        started_in = home.parents[len(before.parts) - 1] if home.parts[-len(before.parts) :] == before.parts else Path()
        tree = _map_paths(tree, model, lambda path: str(absolute(started_in / path)))
        before = absolute(started_in / before)
    return tree if before == home else _map_values(tree, lambda value: moved(value, before, home))


def moved(value: Any, before: Path, home: Path) -> Any:
    """Return a setting of a run that lay in `before`, as it is to be read now that the run lies in `home`."""
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    if Path(value).is_relative_to(before):
        return str(home / Path(value).relative_to(before))
    beside = Path(os.path.normpath(home / os.path.relpath(value, before)))
    if os.path.exists(value) or not (beside.exists() or _moved_as_a_whole(value, before, home)):
        return value
    return str(beside)


def _moved_as_a_whole(value: str, before: Path, home: Path) -> bool:
    """Return whether the folder with both the run and `value`, which may not be made yet, is gone, and the run lies as
    it did in another one.
    """
    if not before.is_absolute():
        return False
    project = Path(os.path.commonpath([value, before]))
    below = before.relative_to(project).parts
    return not project.exists() and home.parts[-len(below) :] == below


def _map_values(node: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(node, dict):
        return {name: _map_values(value, change) for name, value in node.items()}
    return change(node)


def _map_paths(tree: dict[str, Any], model: type[BaseModel], change: Callable[[str], str]) -> dict[str, Any]:
    changed = dict(tree)
    for name, value in tree.items():
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        section = section_type(annotation)
        if section is not None and isinstance(value, dict):
            changed[name] = _map_paths(value, section, change)
        elif isinstance(value, str) and (_is_path(annotation) or _is_template_file(name, value)):
            changed[name] = change(value)
    return changed


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(_is_path(option) for option in typing.get_args(annotation))


def _is_template_file(name: str, value: str) -> bool:
    return name == "chat_template" and value not in NO_TEMPLATE_FILE


def section_type(annotation: Any, kind: str | None = None) -> type[BaseModel] | None:
    """Return the section that a field holds, if it holds one, also where it may be null; of several the one that is
    tagged as `kind`, or the first.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        tags = [option.tag for option in options[1:] if isinstance(option, Tag)]
        return None if kind is not None and tags and kind not in tags else section_type(options[0], kind)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((found for option in options if (found := section_type(option, kind)) is not None), None)
    return None


def same_value(before: Any, after: Any) -> bool:
    """Return whether two values of a setting are equal, or paths of the same file."""
    if before == after:
        return True
    both = isinstance(before, str) and isinstance(after, str) and after.startswith("/")
    return both and os.path.realpath(before) == os.path.realpath(after)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings of a tree by dotted key."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {
        key: value
        for name, branch in tree.items()
        for key, value in flatten(branch, f"{prefix}.{name}" if prefix else str(name)).items()
    }
