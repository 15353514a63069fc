"""The tags and boxes that both grammars are made of. Every function is linear in the text and accepts any string."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAG = re.compile(r"<(/?)(think|step|answer|step_verification|final_verification)>")
_BOX = "\\boxed{"


@dataclass(frozen=True)
class Tag:
    """One tag: its name, with "/" in front where it closes, and the characters [start, end) it takes."""

    name: str
    start: int
    end: int


def find_tags(text: str) -> list[Tag]:
    """Return all tags of the protocol in `text`, in order; anything else in angle brackets is text."""
    return [Tag(match[1] + match[2], match.start(), match.end()) for match in _TAG.finditer(text)]


def last_box(text: str) -> str | None:
    r"""Return the stripped text in the last `\boxed{…}`; None where there is no box, or it never closes, or it is
    empty.

    Braces inside may nest; `\{` and `\}` are text.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position].strip() or None
        position += 1
    return None
