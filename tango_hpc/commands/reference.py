"""docs/configuration.md, made from the types of configurations and profiles, and the table of docs/models.md, made from
the families: `python -m tango_hpc.commands.reference`.
"""

from __future__ import annotations

import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tango_hpc.base.config.schema import Config
from tango_hpc.base.config.values import Section
from tango_hpc.base.families import FAMILIES, Family
from tango_hpc.base.families.family import ALWAYS_REFUSED
from tango_hpc.base.published import PUBLISHED
from tango_hpc.commands.profiles import Profile

HEADER = """# Configuration

Generated from the types in `tango_hpc/base/config/` and `tango_hpc/commands/profiles.py` by
`python -m tango_hpc.commands.reference`; a test keeps it up to date.

A config is a YAML file. It may name a `base`, the path of another config from this file, and a base may have a base. A
command takes several files and settings: `tango train CONFIG configs/methods/dapo.yaml train.generator_steps=50`. Each
lies over what is before it: mappings merge key by key, any other value replaces what is below, and `null` (`verifier:
null`) takes a section away. `${key.path}` in a string stands for another setting. Unknown keys are refused. Everything
that is wrong is reported at once, before anything loads: each mistake with its key and the file that has it.
The run directory's `config.yaml` holds the outcome and needs no base.
"""
PROFILES = """# Profiles

`--profile NAME` takes the file of that name in `~/.config/tango_hpc/profiles`, else the one in `slurm/profiles`, or any
file by its path.
"""


def render() -> str:
    """Return the whole page."""
    parts = [HEADER]
    seen: set[type[BaseModel]] = set()
    _section("(top level)", Config, parts, seen)
    parts.append(PROFILES)
    _section("(a profile)", Profile, parts, seen)
    return "\n".join(parts)


def _section(title: str, model: type[Section], parts: list[str], seen: set[type[BaseModel]]) -> None:
    seen.add(model)
    parts.append(f"## {title}\n\n{' '.join((model.__doc__ or '').split())}\n")
    parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
    inner: list[tuple[str, type[Section]]] = []
    for name, field in model.model_fields.items():
        inner += [(name, section) for section in _inner_sections(field.annotation)]
        parts.append(f"| `{name}` | {_type(field.annotation, field)} | {_default(field)} | {_meaning(field)} |")
    parts.append("")
    for name, section in inner:
        path = name if title.startswith("(") else f"{title}.{name}"
        if section not in seen:
            _section(path, section, parts, seen)


def _meaning(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def _inner_sections(annotation: Any) -> list[type[Section]]:
    """Return the sections that a field can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for option in typing.get_args(annotation) for section in _inner_sections(option)]


def _type(annotation: Any, field: FieldInfo) -> str:
    sections = _inner_sections(annotation)
    options = [option for option in typing.get_args(annotation) if option is not NoneType]
    if sections:
        text = " or ".join(f"[{section.__name__}](#{_anchor(section)})" for section in sections)
    elif typing.get_origin(annotation) is typing.Literal:
        text = ", ".join(f"`{option}`" for option in typing.get_args(annotation))
    elif typing.get_origin(annotation) is tuple and Ellipsis in options:
        names = typing.get_args(options[0]) if typing.get_origin(options[0]) is typing.Literal else []
        text = f"list of {', '.join(f'`{name}`' for name in names) or _name(options[0]) + 's'}"
    elif typing.get_origin(annotation) is tuple:
        text = "[low, high]"
    else:
        text = _name(options[0]) if NoneType in typing.get_args(annotation) else _name(annotation)
        text += _bounds(field)
    return text + (" or null" if NoneType in typing.get_args(annotation) else "")


def _name(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(_name, options))
    if origin is typing.Literal:
        return ", ".join(f"`{option}`" for option in options)
    if origin in (list, tuple):
        return f"list of {_name(options[0])}s"
    if origin is dict:
        return "mapping"
    return {Path: "path", int: "int", float: "float", bool: "bool", str: "string"}[annotation]


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    items = [
        f"{signs[key]} {getattr(bound, key):g}" for bound in field.metadata for key in signs if hasattr(bound, key)
    ]
    return f", {', '.join(items)}" if items else ""


def _anchor(section: type[Section]) -> str:
    return _paths()[section].replace(".", "").lower()


def _paths() -> dict[type[Section], str]:
    paths: dict[type[Section], str] = {}

    def walk(prefix: str, model: type[Section]) -> None:
        for name, field in model.model_fields.items():
            for section in _inner_sections(field.annotation):
                if section not in paths:
                    paths[section] = f"{prefix}{name}"
                    walk(f"{prefix}{name}.", section)

    walk("", Config)
    walk("", Profile)
    return paths


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory in (list, dict):
        return f"`{field.default_factory()}`"
    if isinstance(field.default, Section) or field.default_factory is not None:
        return "see there"
    if field.default is None:
        return "`null`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default}`"


MARKS = ("<!-- families, by python -m tango_hpc.commands.reference -->\n", "<!-- end of families -->\n")
_NORMS = {"before": "in front of the blocks", "after": "after the blocks", "both": "on both sides of the blocks"}
_QK_NORMS = {"head": "of each head of q and k", "all": "over all heads of q and k", None: ""}
_WINDOWS = {"none": "", "all": "one window for all layers", "by kind": "windows by layer"}


def families_table() -> str:
    """Return the table of supported families."""
    lines = [
        "| `model_type` | models | sizes checked | what it has | rotary kinds | refused |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, family in FAMILIES.items():
        known = [model for model, config in PUBLISHED.items() if config["model_type"] == name and "-sft" not in model]
        refused = ", ".join(f"`{key}`" for key in (*ALWAYS_REFUSED, *family.refused))
        cells = (f"`{name}`", ", ".join(family.members), ", ".join(known), _has(family))
        lines.append(f"| {' | '.join(cells)} | {', '.join(family.rope_types)} | {refused} |")
    return "\n".join(lines) + "\n"


def _has(family: Family) -> str:
    """Return in a few words how the layers of a family differ from Llama's."""
    parts = [
        f"norms {_NORMS[family.norms]}" if family.norms != "before" else "",
        f"norms {_QK_NORMS[family.qk_norm]}" if family.qk_norm else "",
        "biases on q, k and v" if family.qkv_bias else "",
        "fused projections" if family.fused else "",
        _WINDOWS[family.windows],
        "positions of part of a head" if family.rope_partial else "",
        "positions by kind of layer" if family.rope_by_kind else "",
        "GELU" if family.activation != "silu" else "",
        family.also,
    ]
    return "; ".join(filter(None, parts)) or "Llama's layers"


def write_pages(docs: Path) -> None:
    """Write the configuration's page, and the table into the page about models."""
    (docs / "configuration.md").write_text(render())
    page = (docs / "models.md").read_text()
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    (docs / "models.md").write_text(f"{before}{MARKS[0]}{families_table()}{MARKS[1]}{after}")


if __name__ == "__main__":
    write_pages(Path(__file__).parents[2] / "docs")
