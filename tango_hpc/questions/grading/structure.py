"""The kind of answer that a cleaned text is, read without evaluating anything: list, tuple, interval, named value,
words.
"""

from __future__ import annotations

import re
from itertools import product

from tango_hpc.questions.grading.latex import bracketed, split_top_level
from tango_hpc.questions.grading.numbers import looks_grouped
from tango_hpc.questions.grading.units import split_unit

NAMED = re.compile(
    r"(?P<name>(?:\\(?:angle|min|max|text\{[^{}]*\}|[a-zA-Z]+)\s*)?[A-Za-z]?(?:\s*[A-Z](?![a-z]))*"
    r"(?:_\s*(?:\{[^{}]*\}+|\w))?(?:\^?\{?\\?'\}?)?)\s*(?P<argument>\([^()=]*\))?\s*=\s*(?P<value>[^=]+)"
)
_MEMBER = re.compile(r"(?:\\?[A-Za-z]+(?:_\w|_\{\w+\})?)\s*\\in(?![A-Za-z])\s*(.+)|t\s*([(\[].*[)\]])")
_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<=|>=|<|>")
_UPWARDS = (r"\le", "<=", "<")
IN_BASE = re.compile(r"([0-9A-Fa-f,]+)\s*_\s*(?:\{\s*(\d+|\\text\{[a-z ]+\})\s*\}|(\d+))")
_MINUS_PLUS = re.compile(r"\\mp(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
LETTER = re.compile(r"(?:\\text\s*\{\s*)?\(?\s*([A-Ha-h])\s*[).:]?\s*\}?\)?")
_ALL_REALS = {r"(-\infty,\infty)", r"\mathbb{R}", "R"}


def items_of(text: str, several: bool) -> list[str]:
    """Return the separate answers in `text`: at top-level commas, in braces, around \\cup, and both signs of \\pm."""
    if looks_grouped(split_unit(text)[0]) and not several:
        return [text]
    if (inside := _inside_braces(text)) is not None:
        return items_of(inside, several=True)
    parts = [piece for part in split_top_level(text) for piece in re.split(r"\\cup(?![A-Za-z])", part) if piece.strip()]
    if len(parts) == 1 and not is_collection(parts[0]):
        return both_signs(parts[0])
    items: list[str] = []
    for part in map(str.strip, parts):
        items += items_of(part, several=True) if is_collection(part) else both_signs(part)
    return _values_of_one_name(parts, items) or list(filter(None, items))


def _inside_braces(text: str) -> str | None:
    """Return the text inside the braces of a whole set; plain braces make a set only around a list."""
    inside = bracketed(text)
    if inside and (inside[0] == r"\{" or (inside[0] == "{" and "," in inside[1])):
        return inside[1]
    return None


def _values_of_one_name(parts: list[str], items: list[str]) -> list[str] | None:
    """`x = 1, 2` lists two values of x; None where the first part names nothing, or later items have their own name."""
    named = NAMED.fullmatch(parts[0]) if parts else None
    if not named or named["argument"] or any("=" in item for item in items[1:]):
        return None
    return [named["value"].strip(), *items[1:]]


def is_collection(text: str) -> bool:
    inside = bracketed(text)
    return r"\cup" in text or (inside is not None and inside[0] == r"\{")


def both_signs(text: str) -> list[str]:
    """Return every reading of the signs: each \\pm on its own, each \\mp against the first \\pm; a tuple takes its sign
    inside.
    """
    num_signs = len(_PLUS_MINUS.findall(text))
    if not 1 <= num_signs <= 4:
        return [text]
    readings = []
    for signs in product("+-", repeat=num_signs):
        remaining = iter(signs)
        reading = _PLUS_MINUS.sub(lambda _: next(remaining), text)  # noqa: B023 (used up before the next turn)
        reading = _MINUS_PLUS.sub("-" if signs[0] == "+" else "+", reading).strip()
        if (match := re.fullmatch(r"([+-])\s*(\(.*\))", reading)) and (entries := tuple_of(match[2])):
            reading = "(" + ",".join(f"{match[1]}({entry})" if match[1] == "-" else entry for entry in entries) + ")"
        readings.append(reading.removeprefix("+"))
    return readings


def inside_membership(text: str) -> str:
    match = _MEMBER.fullmatch(text)
    return (match[1] or match[2]).strip() if match else text


def interval_of(text: str) -> tuple[str, str, str, str] | None:
    """Return (opening, left, right, closing) of an interval or a chain of inequalities in one variable.

    `(a, b)` may be a point as well as an open interval: both sides of a comparison read it the same way.
    """
    if spelling(text) in _ALL_REALS:
        return ("(", r"-\infty", r"\infty", ")")
    if (inside := bracketed(text)) and inside[0] in "([":
        parts = split_top_level(inside[1], ",")
        return (inside[0], parts[0], parts[1].removeprefix("+"), inside[2]) if len(parts) == 2 else None
    return _interval_of_inequalities(text)


def _interval_of_inequalities(text: str) -> tuple[str, str, str, str] | None:
    """`a < x \\le b` or `x > a`, read in either direction; the end that is not given is infinite."""
    relations = _RELATION.findall(text)
    terms = [term.strip() for term in _RELATION.split(text)]
    if not 1 <= len(relations) <= 2 or not all(terms):
        return None
    if len(relations) == 1:
        _add_infinite_end(terms, relations)
    upwards = relations[0] in _UPWARDS
    if (relations[1] in _UPWARDS) != upwards or not _is_variable(terms[1]):
        return None
    if not upwards:
        terms.reverse()
        relations.reverse()
    return ("(" if relations[0] in "<>" else "[", terms[0], terms[2], ")" if relations[1] in "<>" else "]")


def _add_infinite_end(terms: list[str], relations: list[str]) -> None:
    """Make `x > a` the chain that it stands for, in place: infinity > x > a."""
    end_is_first = _is_variable(terms[1]) and not _is_variable(terms[0])
    upwards = relations[0] in _UPWARDS
    missing = 2 if end_is_first else 0
    terms.insert(missing, r"\infty" if upwards == end_is_first else r"-\infty")
    relations.insert(missing, "<" if upwards else ">")


def _is_variable(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z](?:_\w|_\{\w+\})?|\\[a-z]+|[a-z]\([a-z]\)", text) is not None and text != r"\pi"


def tuple_of(text: str) -> list[str] | None:
    """Return the entries of an ordered tuple or a row or column vector, two or more."""
    if match := re.fullmatch(r"\\begin\{([pbv]?matrix)\}(.*)\\end\{\1\}", text, re.DOTALL):
        return None if match[1] == "vmatrix" else _entries_of_vector(match[2])
    inside = bracketed(text)
    if inside is None or inside[0] + inside[2] != "()":
        return None
    parts = split_top_level(inside[1], "," if "," in inside[1] else ";")
    return parts if len(parts) > 1 else None


def _entries_of_vector(matrix: str) -> list[str] | None:
    """Return the entries of a matrix of one row or one column; None where it has more of both."""
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix) if row.strip()]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows]
    if len(cells) > 1 and len(cells[0]) > 1:
        return None
    return [cell for row in cells for cell in row]


def name_of(item: str) -> str | None:
    match = NAMED.fullmatch(item)
    return re.sub(r"\s+", "", match["name"]) if match else None


def base_letter(name: str) -> str:
    return re.split(r"[_^']", re.sub(r"\s+", "", name))[0]


def rename_argument(answer: re.Match[str], gold: re.Match[str]) -> str:
    """Return the answer's right-hand side with its single-letter argument renamed to the gold answer's."""
    ours, theirs = ((match["argument"] or "").strip("() ") for match in (gold, answer))
    if re.fullmatch("[A-Za-z]", ours) and re.fullmatch("[A-Za-z]", theirs) and ours != theirs:
        return re.sub(rf"(?<![A-Za-z\\]){theirs}(?![A-Za-z])", ours, answer["value"])
    return answer["value"]


def is_words(text: str) -> bool:
    """Return whether an answer is words rather than mathematics: `\\text{even}`, `Evelyn`, but not `xy` or `\\pi`."""
    if re.search(r"\\text", text):
        outside = re.sub(r"\\text\{[^{}]*\}", "", text)
        return not re.search(r"\d|\\(?!text)[A-Za-z]+|[=+^/]", outside) and not _has_math(text)
    return re.fullmatch(r"[A-Za-z]{3,}(?:[ ,'-]+[A-Za-z]+)*", text) is not None and len(set(text)) > 2


def _has_math(text: str) -> bool:
    outside = re.sub(r"\\text\s*\{[^{}]*\}", " ", text)
    return re.search(r"[A-Za-z0-9]", outside) is not None


def spelling(text: str) -> str:
    return re.sub(r"\s+", "", text).replace("{,}", "")
