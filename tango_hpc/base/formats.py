"""Numbers, settings and messages as people read them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SPARKS = "▁▂▃▄▅▆▇█"

# Characters that command a terminal (C0 but for line end and tab, DEL, C1), that turn the direction of what follows
# them, and halves of characters that cannot be printed at all.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
_NO_COLOUR = "\x1b[0m"


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss; "?" for what a damaged file has in their place."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def visible(text: str) -> str:
    """Return `text` for a terminal, with control characters and changes of direction made visible (ESC as ␛)."""
    return _COMMANDS.sub(lambda match: _picture(ord(match[0])), text)


def with_colours(text: str) -> str:
    """Return `visible(text)` that keeps colour codes, as logs have them, and resets the colours at the end."""
    parts = [part if at % 2 else visible(part) for at, part in enumerate(_COLOURS.split(text))]  # odd ones are codes
    return "".join([*parts, _NO_COLOUR] if len(parts) > 1 and parts[-2] != _NO_COLOUR else parts)


def say(console: Console, message: str, form: Callable[[str], str] = visible) -> None:
    """Print `message` in its own words: no markup, no line breaks that would spoil copying, nothing else that
    commands.
    """
    console.print(form(message), markup=False, highlight=False, soft_wrap=True)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"


def number(value: Any) -> str:
    """Return four digits of a number; nothing for None, and text as it is."""
    return f"{value:.4g}" if isinstance(value, int | float) else "" if value is None else str(value)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as a row of block characters, averaged so that all of them fit `width`."""
    if len(values) < 2:
        return ""
    per_cell = max(1, -(-len(values) // width))
    cells = [statistics.fmean(values[start : start + per_cell]) for start in range(0, len(values), per_cell)]
    low, high = min(cells), max(cells)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((cell - low) * scale)] for cell in cells)


def label_of(settings: Mapping[str, Any]) -> str:
    """Return settings in one line; the last word of a key where that tells it from the others."""
    last_words = [key.rpartition(".")[2] for key in settings]
    names = [word if last_words.count(word) == 1 else key for key, word in zip(settings, last_words, strict=True)]
    return ", ".join(f"{name}={value}" for name, value in zip(names, settings.values(), strict=True)) or "base"
