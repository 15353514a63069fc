"""Forms in which answers are written: ellipses, times, ratios, chains of equations, named points, repeating decimals.

Each function reads one form and gives None for any other; nothing here evaluates an expression.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tango_hpc.questions.grading.latex import bracketed, split_top_level

ELLIPSIS = r"\ldots"
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:\\text\{)?\s*([ap])?\.?\s*(?:m\.?)?\s*\}?", re.IGNORECASE)
_REPEATING = re.compile(
    r"(-?\d*)\.(\d*?)(?:\\overline\s*\{\s*(?P<bar>\d+)\s*\}|\\overline\s*(?P<digit>\d)|\\dot\s*\{?\s*(?P<dot>\d)\s*\}?"
    r"|\((?P<round>\d+)\)|(?:(?P<one>\d)(?P=one){2,}|(?P<several>\d\d+?)(?P=several)+)\s*\\ldots\s*)"
)
_PERIODS = ("bar", "digit", "dot", "round", "one", "several")
_LETTERS = r"[A-Za-z](?:_\{?\w+\}?)?"
_POINT = re.compile(
    rf"(?P<names>\(\s*{_LETTERS}(?:\s*,\s*{_LETTERS})+\s*\)|\\langle.*\\rangle)\s*=\s*(?P<value>[(\[].*[)\]])"
)
_SEGMENT = r"\|?\s*(?:\\overline\s*\{)?\s*[A-Z]{1,4}(?:_\s*(?:\{\w+\}|\w))?\s*\}?\s*\|?"
# A quantity that a figure names: a segment, a ratio of segments or of areas, an angle.
_QUANTITY = re.compile(
    rf"(?:{_SEGMENT}(?:\s*[:/]\s*{_SEGMENT})*|\\frac\s*\{{\s*{_SEGMENT}\s*\}}\s*\{{\s*{_SEGMENT}\s*\}}"
    r"|m?\s*\\angle\s*[A-Z]{1,3})"
)


def time_of(text: str) -> tuple[str, ...] | None:
    """Return hours, minutes, seconds and a or p of a time of day; None for other text, a ratio such as 7:3 too."""
    match = _TIME.fullmatch(text.strip())
    if match is None or int(match[1]) > 24:
        return None
    return (str(int(match[1])), match[2], match[3] or "00", (match[4] or "").casefold())


def same_time(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Return whether two times are one; a half of the day that only one of them names does not matter."""
    return gold[:3] == answer[:3] and (gold[3] == answer[3] or "" in (gold[3], answer[3]))


def ratio_of(text: str) -> list[str] | None:
    """Return the members of a ratio `a:b` or `a:b:c`."""
    parts = split_top_level(text, ":")
    return parts if len(parts) > 1 and text.count(":") == len(parts) - 1 else None


def repeating(text: str) -> Fraction | None:
    r"""Return the value of a repeating decimal: `0.\overline{3}`, `0.\dot{3}`, `0.(3)`, and `0.333\ldots`, whose shown
    digits repeat at least three times, or twice where the period is longer.
    """
    match = _REPEATING.fullmatch(text.strip())
    if match is None:
        return None
    sign = -1 if match[1].startswith("-") else 1
    whole, start = match[1].lstrip("-") or "0", match[2]
    period = next(found for name in _PERIODS if (found := match[name]))
    shift = 10 ** len(start)
    return sign * (Fraction(int(whole + start), shift) + Fraction(int(period), shift * (10 ** len(period) - 1)))


def quantity_of(text: str) -> str | None:
    r"""Return the value of a quantity that a figure names: `|AB| = 1`, `\frac{NO}{BO} = 2`, `S_1:S_2 = 7:32`."""
    name, equals, value = text.partition("=")
    return value.strip() if equals and "=" not in value and _QUANTITY.fullmatch(name.strip()) else None


def named_point(text: str) -> tuple[list[str], list[str]] | None:
    """Return names and coordinates of `(x, y) = (2, 3)`; None for other text."""
    match = _POINT.fullmatch(text)
    if match is None:
        return None
    names, value = bracketed(match["names"]), bracketed(match["value"])
    if names is None or value is None:
        return None
    named, entries = split_top_level(names[1], ","), split_top_level(value[1], ",")
    return (named, entries) if len(named) == len(entries) else None
