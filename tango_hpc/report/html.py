"""The templates, from which every page is made: one file each, with its style, drawings and data in it."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from tango_hpc.base.formats import number

_TEMPLATES = Environment(
    loader=PackageLoader("tango_hpc.report"), autoescape=select_autoescape(), undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
_TEMPLATES.filters["number"] = number
_TEMPLATES.policies["json.dumps_kwargs"] = {"ensure_ascii": False}


def render(template: str, **values: Any) -> str:
    """Return the text of `template` (a file of templates/) with these values, which are escaped where it is HTML."""
    return _TEMPLATES.get_template(template).render(values)
