"""Plain numbers, read exactly: `1,234.50`, `-3/4`, `\\frac{3}{4}`, `1\\frac{4}{5}`, `6.72 \\times 10^{-5}`."""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_DIGITS = 400
_DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"({_DECIMAL})")
_QUOTIENT = re.compile(rf"({_DECIMAL})\s*/\s*({_DECIMAL})")
_FRACTION = re.compile(rf"\\frac\{{\s*([+-]?\s*(?:{_DECIMAL}))\s*\}}\{{\s*([+-]?\s*(?:{_DECIMAL}))\s*\}}")
_MIXED = re.compile(r"(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|(\d+)\s+(\d+)\s*/\s*(\d+)")
_SCIENTIFIC = re.compile(
    rf"({_DECIMAL})\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*([+-]?\d{{1,3}})\s*\}}?|[eE]([+-]?\d{{1,3}}))"
)


def decimal(text: str) -> Fraction:
    """Return exact value of digits with optional thousands separators, sign and decimal point."""
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")


def plain_number(text: str) -> Fraction | None:
    """Return the exact value of `text` where it is one plain number, else None.

    A whole number followed by a proper fraction is a mixed number, as in school: `1\\frac{4}{5}` is 9/5.
    """
    text = text.strip()
    if len(text) > _MAX_DIGITS:
        return None
    sign = 1
    while text[:1] in ("+", "-"):
        sign = -sign if text[0] == "-" else sign
        text = text[1:].lstrip()
    value = _unsigned(text)
    return None if value is None else sign * value


def _unsigned(text: str) -> Fraction | None:
    if _NUMBER.fullmatch(text):
        return decimal(text)
    if match := _MIXED.fullmatch(text):
        whole, numerator, denominator = (int(group) for group in match.groups() if group is not None)
        return whole + Fraction(numerator, denominator) if 0 < numerator < denominator else None
    if match := _QUOTIENT.fullmatch(text) or _FRACTION.fullmatch(text):
        top, bottom = decimal(match[1]), decimal(match[2])
        return top / bottom if bottom else None
    if match := _SCIENTIFIC.fullmatch(text):
        return decimal(match[1]) * Fraction(10) ** int(match[2] or match[3])
    return None


def looks_grouped(text: str) -> bool:
    """Return whether the commas of `text` can only be thousands separators: `58,500`, not `58, 500` or `1,2`."""
    return re.fullmatch(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", text) is not None
