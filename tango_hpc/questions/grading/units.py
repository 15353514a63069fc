"""Units at the end of an answer: cut off, compared, converted where a mathematician would."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Unit:
    """`factor` base units of `dimension` (length in m, time in s, mass in kg, money in dollars, angle in degrees)."""

    dimension: str
    factor: Fraction


PERCENT = Unit("percent", Fraction(1))
DEGREE = Unit("angle", Fraction(1))
_TABLE = {
    "length": {
        "mm": "1/1000", "millimeter": "1/1000", "cm": "1/100", "centimeter": "1/100", "centimetre": "1/100", "m": "1",
        "meter": "1", "metre": "1", "km": "1000", "kilometer": "1000", "kilometre": "1000", "in": "0.0254",
        "inch": "0.0254", "ft": "0.3048", "foot": "0.3048", "feet": "0.3048", "yd": "0.9144", "yard": "0.9144",
        "mi": "1609.344", "mile": "1609.344",
    },
    "time": {
        "s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600", "hr": "3600", "hour": "3600",
        "day": "86400", "week": "604800",
    },
    "mass": {"g": "1/1000", "gram": "1/1000", "kg": "1", "kilogram": "1", "lb": "0.45359237", "pound": "0.45359237"},
    "money": {"dollar": "1", "usd": "1", "cent": "1/100"},
    "angle": {"degree": "1", "deg": "1"},
    "percent": {"percent": "1", "percentage": "1"},
    "volume": {"liter": "1/1000", "litre": "1/1000", "l": "1/1000", "ml": "1/1000000", "milliliter": "1/1000000"},
    "speed": {"mph": "0.44704", "kmph": "5/18"},
}  # fmt: skip
_WORDS = {word: Unit(kind, Fraction(size)) for kind, sizes in _TABLE.items() for word, size in sizes.items()}
_POWER = r"(?:\^\s*\{?\s*([23])\s*\}?)?"
_TEXT_UNIT = re.compile(rf"\\text\s*\{{\s*([^{{}}]*?)\s*{_POWER}\s*\}}\s*{_POWER}$")
_BARE_UNIT = re.compile(
    rf"(?<=[\d}})\s])\s*((?:(?:square|cubic|sq|cu)\.? )?[A-Za-z]{{2,12}}(?: ?/ ?[A-Za-z]{{1,8}})?)\s*{_POWER}$"
)
_ANGLE_UNIT = re.compile(r"\^\{\\circ\}$")
_TRIGONOMETRIC = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_PERCENT_UNIT = re.compile(r"\\?%$")


def split_unit(text: str) -> tuple[str, Unit | None]:
    """(value, unit) of a cleaned answer. A word that is no unit of measure (`12 \\text{ apples}`) is dropped: None.

    A bare trailing word is taken for a unit only where it is a known one, since letters may also be variables.
    """
    text = text.strip()
    if text.startswith(r"\$"):
        return text[2:].strip(), _WORDS["dollar"]
    if re.match(r"-\s*\\\$", text):
        return "-" + text.split(r"\$", 1)[1].strip(), _WORDS["dollar"]
    for pattern, unit in ((_ANGLE_UNIT, DEGREE), (_PERCENT_UNIT, PERCENT)):
        if (match := pattern.search(text)) and match.start() > 0 and not _TRIGONOMETRIC.search(text):
            return text[: match.start()].strip(), unit
    if (match := _TEXT_UNIT.search(text)) and match.start() > 0:
        return text[: match.start()].strip(), named_unit(match[1], match[2] or match[3])
    if (match := _BARE_UNIT.search(text)) and (known := named_unit(match[1], match[2])):
        return text[: match.start()].strip(), known
    return text, None


def named_unit(name: str, power: str | None = None) -> Unit | None:
    """Return the unit called `name` (`inches`, `square feet`, `km/h`, `cm^2`), to `power`; None for anything else."""
    name = re.sub(r"[.\s]+", " ", name.casefold()).strip()
    if match := re.fullmatch(rf"(.*?)\s*{_POWER}", name):
        name, power = match[1], match[2] or power
    for prefix, implied in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if name.startswith(prefix):
            name, power = name[len(prefix) :], implied
    if match := re.fullmatch(r"([a-z]+) ?(?:/| per ) ?([a-z]+)", name):
        top, bottom = _word(match[1]), _word(match[2])
        if top and bottom:
            dimensions = (top.dimension, bottom.dimension)
            kind = "speed" if dimensions == ("length", "time") else "/".join(dimensions)
            return Unit(kind, top.factor / bottom.factor)
        return None
    unit = _word(name)
    if unit is None or power is None:
        return unit
    exponent = int(power)
    kind = "volume" if (unit.dimension, exponent) == ("length", 3) else f"{unit.dimension}^{exponent}"
    return Unit(kind, unit.factor**exponent)


def _word(word: str) -> Unit | None:
    for ending in ("", "s", "es"):
        if word.endswith(ending) and word.removesuffix(ending) in _WORDS and (not ending or len(word) > 2):
            return _WORDS[word.removesuffix(ending)]
    return None
