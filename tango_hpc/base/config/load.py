"""From a YAML file, its base and `key.path=value` overrides to a checked `Config`, every mistake in one message.

OmegaConf would make this file a sixth shorter, but of its releases since 2.1 only 2.4.0 installs beside math-verify
(the others pin an older antlr4). It also brings a language of its own into every string, in which `${oc.env:NAME}`
writes the environment into run directories unless that resolver is removed from the whole process.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tango_hpc.base.config.checks import find_conflicts
from tango_hpc.base.config.paths import absolute, section_type, seen_from_run
from tango_hpc.base.config.roles import OWN_MODEL, SAME_MODEL
from tango_hpc.base.config.schema import Config, ProtocolConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import is_run

_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_OVERRIDE = re.compile(r"\s*[\w.]+\s*=")
_NO_BASE = object()


# What PyYAML raises: its own; ValueError for a date with a 13th month; TypeError for a list as a key; RecursionError
# for ten thousand brackets.
NOT_YAML = (yaml.YAMLError, ValueError, TypeError, RecursionError)


class YamlLoader(yaml.SafeLoader):
    """Reads numbers and booleans as YAML 1.2 has them. Duplicate keys are refused, not overwritten.

    PyYAML's own YAML 1.1 reads `1e-6` as a text, `off` as false, `010` as 8 and `1:00:00` as 3600.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":int"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)$"),
    list("-+0123456789."),
)


@dataclass(frozen=True)
class Layers:
    """Settings of several sources over each other: config files, their bases, and `key.path=value` overrides.

    Mappings merge key by key; any other value, null too, replaces what is below under its key, and so does a mapping
    with `same_as`, whose other keys are not those of what is below.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    files: dict[Path, dict[str, Any]] = field(default_factory=dict)  # what each file says itself, the lowest first

    def over(self, *settings: str | Path) -> Layers:
        """Return these layers with others on top, each a config file or a `key.path=value`, later over earlier.

        Below a file lies its base, unless that is a layer already: two files on one base are both over it.
        """
        tree, files = copy.deepcopy(self.tree), dict(self.files)
        for argument in settings:
            if not is_config_file(argument):
                apply_override(tree, str(argument))
                continue
            for file, layer in _with_bases(Path(argument)):
                if not any(_is_same_file(file, other) for other in files) or file == Path(argument):
                    files.pop(file, None)
                    files[file] = layer
                    tree = _merge(tree, copy.deepcopy(layer))
        return Layers(tree, files)

    def check(self, origin: str | None = None) -> Config:
        """Return the configuration. Raises `UserError` with every mistake found; `origin` names the source."""
        return validate_tree(self.tree, origin or str(list(self.files)[-1]), self.files)


def is_config_file(argument: str | Path) -> bool:
    """Return whether an argument of a command names a config file, rather than set a key."""
    return isinstance(argument, Path) or (argument.endswith((".yaml", ".yml")) and not _OVERRIDE.match(argument))


def load_config(path: Path, settings: typing.Sequence[str] = ()) -> Config:
    """Read `path` and put `settings` over it, config files and overrides; resolve `${key.path}`, validate and
    cross-check.

    Raises `UserError` with every mistake found, each with its key's path.
    """
    return read_layers(path, settings).check()


def read_layers(path: Path, settings: typing.Sequence[str] = ()) -> Layers:
    """Return the layers of a config file and of what a command names after it."""
    return Layers().over(Path(path), *settings)


def read_run_dir(path: Path, settings: typing.Sequence[str] = ()) -> Path:
    """Return the `run.dir` of a config alone, absolute; its other settings may have become invalid since its
    run began.
    """
    tree = read_layers(path, settings).tree
    mistakes: list[str] = []
    section = tree.get("run")
    value = _resolve(section.get("dir") if isinstance(section, dict) else None, tree, ("run", "dir"), mistakes)
    if mistakes or not isinstance(value, str):
        raise UserError(f"{path} has no usable run.dir: {'; '.join(mistakes) or value!r}")
    return absolute(Path(value))


def read_tree(path: Path) -> dict[str, Any]:
    """Return a config file's settings over those of its bases, as nested dictionaries."""
    return read_layers(path).tree


def _with_bases(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return a file and the files below it, the lowest first, each with what it says itself.

    The config.yaml of a run is read as seen from where it lies now.
    """
    found: list[tuple[Path, dict[str, Any]]] = []
    file = path
    while True:
        tree = read_yaml(file)
        named = tree.pop("base", _NO_BASE)
        folder = absolute(file).parent
        is_of_run = named is _NO_BASE and file.name == "config.yaml" and is_run(folder)
        found.insert(0, (file, seen_from_run(tree, folder, Config) if is_of_run else tree))
        if named is _NO_BASE:
            return found
        if not isinstance(named, str):
            raise UserError(f"{file}: base: must be the path of another config, seen from this file (got {named!r})")
        below = file.parent / named
        if not os.path.exists(below):  # False too for what cannot be the name of a file
            raise UserError(f"{file}: base: no config file at {below}; the path is relative to the file that names it")
        if any(_is_same_file(below, other) for other, _ in found):
            raise UserError(f"{file}: base: {below} is built on this file; let one of the two have no base")
        file = below


def _is_same_file(file: Path, other: Path) -> bool:
    return os.path.realpath(file) == os.path.realpath(other)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise UserError(f"no YAML file at {path}; shipped ones are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from None
    try:
        tree = yaml.load(text, Loader=YamlLoader)
    except NOT_YAML as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {type(tree).__name__}")
    return tree


def _merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)) or ("same_as" in above and "same_as" not in below):
        return above
    return {**below, **{key: _merge(below[key], value) if key in below else value for key, value in above.items()}}


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key.path=value` (value in YAML) in the tree; sections on the way are made."""
    key, separator, value = override.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise UserError(f"override {override!r} is not of the form key.path=value, e.g. train.generator_steps=50")
    if names[0] == "base":
        raise UserError(f"override {override!r}: only a config file names its base; name several files instead")
    try:
        parsed = yaml.load(value, Loader=YamlLoader)
    except NOT_YAML as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {error}") from None
    node = tree
    for depth, name in enumerate(names[:-1]):
        if node.get(name) is None:
            node[name] = {}
        if not isinstance(node[name], dict):
            raise UserError(f"override {override!r}: {'.'.join(names[: depth + 1])} is a value, not a section")
        node = node[name]
    node[names[-1]] = parsed


def validate_tree(tree: dict[str, Any], origin: str, files: Mapping[Path, dict[str, Any]] | None = None) -> Config:
    """Return types first, then combinations; one `UserError` lists all that is wrong. `origin` names the source,
    `files` the layers in which a wrong value is looked for.
    """
    if tree and tree.keys() <= Config.model_fields.keys() - {"task", "data"}:
        raise UserError(f"{origin} is a layer, with neither task nor data: name it after a config, CONFIG {origin}")
    mistakes: list[str] = []
    resolved = _resolve(tree, tree, (), mistakes)
    config: Config | None = None
    if not mistakes:
        try:
            config = Config.model_validate(resolved)
        except ValidationError as error:
            mistakes = [explain_mistake(item) for item in error.errors()]
    if config is not None:
        try:
            mistakes = find_conflicts(config)
        except PermissionError as error:
            mistakes = [f"{error.filename} cannot be read: permission denied"]
    if mistakes or config is None:
        count = f"{len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}"
        lines = [f"  - {line}{_set_in(line, tree, files or {}, origin)}" for line in mistakes]
        raise UserError(f"{origin} has {count}:\n" + "\n".join(lines))
    return config


def _set_in(mistake: str, tree: dict[str, Any], files: Mapping[Path, dict[str, Any]], origin: str) -> str:
    """Return a note of the file that holds a wrong value; nothing where that is `origin`, an override or no file."""
    key = mistake.partition(":")[0]
    value = value_at(tree, key)
    holding = [file for file, layer in files.items() if value is not None and value_at(layer, key) == value]
    return f" (set in {holding[-1]})" if holding and str(holding[-1]) != origin else ""


def read_protocol(path: Path) -> ProtocolConfig:
    """Return the protocol of the run whose resolved config is the file `path`; the default where there is no file.

    Raises `UserError` for a file that is damaged.
    """
    try:
        return ProtocolConfig.model_validate(read_yaml(path).get("protocol", {}) if path.is_file() else {})
    except ValidationError as error:
        mistakes = "; ".join(explain_mistake(item, ProtocolConfig) for item in error.errors())
        raise UserError(f"{path}: the protocol is damaged: {mistakes}") from None


def value_at(tree: dict[str, Any], key: str) -> Any:
    """Return the value under a dotted key, the whole list for one of its items; None where there is none."""
    node: Any = tree
    for name in key.split("."):
        if isinstance(node, dict):
            node = node.get(name)
    return node


def config_to_yaml(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back to an equal one."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # of a sweep there may be a thousand
    return yaml.dump(config.model_dump(mode="json"), Dumper=dumper, sort_keys=False)


def _resolve(node: Any, root: dict[str, Any], path: tuple[str, ...], mistakes: list[str], depth: int = 0) -> Any:
    if isinstance(node, dict):
        return {key: _resolve(value, root, (*path, str(key)), mistakes, depth) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value, root, (*path, str(i)), mistakes, depth) for i, value in enumerate(node)]
    if not isinstance(node, str) or "${" not in node:
        return node
    where = ".".join(path)
    if depth > 8:
        mistakes.append(f"{where}: {node!r} refers to itself")
        return node

    def look_up(match: re.Match[str]) -> str:
        target: Any = root
        for name in match.group(1).split("."):
            if not isinstance(target, dict) or name not in target:
                mistakes.append(f"{where}: ${{{match.group(1)}}} names no key that is set in this config")
                return ""
            target = target[name]
        return str(_resolve(target, root, path, mistakes, depth + 1))

    return _REFERENCE.sub(look_up, node)


def explain_mistake(item: Any, model: type[BaseModel] = Config) -> str:
    """Return one of pydantic's errors about a `model` as a line that starts with the key's path."""
    path = ".".join(str(part) for part in item["loc"] if part not in (OWN_MODEL, SAME_MODEL))
    if item["type"] == "extra_forbidden":
        *parents, unknown = item["loc"]
        names = _field_names(parents, model)
        close = difflib.get_close_matches(str(unknown), names, n=1)
        below = _elsewhere(unknown, parents, model)
        if below:  # the very name is meant before one that is like it
            # The setting itself where only one was given: rollout.tensor=2 leads to generator.rollout.tensor.
            inner = item["input"]
            setting = f".{next(iter(inner))}" if isinstance(inner, dict) and len(inner) == 1 else ""
            close = [" or ".join(f"{name}{setting}" for name in below)]
        hint = f"did you mean {close[0]}?" if close else f"valid names here: {', '.join(names)}"
        return f"{path}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{path}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(item["input"], dict) and item["type"] == "value_error":
        return f"{path}: {message}"
    return f"{path}: {message[0].lower()}{message[1:]} (got {item['input']!r})"


def _elsewhere(unknown: str, parents: list[str | int], model: Any) -> list[str]:
    """Return paths of a key of that name in the sections beside it."""
    return [
        ".".join(map(str, (*parents, section, unknown)))
        for section in _field_names(parents, model)
        if unknown in _field_names([*parents, section], model)
    ]


def _field_names(parents: list[str | int], model: Any) -> list[str]:
    field: Any = None
    for name in parents:
        if name in (OWN_MODEL, SAME_MODEL):
            model = section_type(field.annotation, str(name))
            continue
        field = model.model_fields.get(str(name))
        model = section_type(field.annotation) if field is not None else None
        if model is None:
            return []
    return list(model.model_fields)
