"""Text of an answer before any mathematics: one spelling for what LaTeX and Unicode spell in many ways, and cuts.

Nothing here evaluates anything, so every function is safe and quick on hostile text of bounded length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_CHARACTERS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ",
    "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u00b0": r"^{\circ}", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u00b1": r"\pm ", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}",
    "\u00be": r"\frac{3}{4}", "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}", "\uff0c": ",", "\u00a0": " ",
    "\u2009": " ", "\u202f": " ", "\u03b8": r"\theta ", "\u211d": r"\mathbb{R}", "\u2018": "'", "\u2019": "'",
    "\u201c": '"', "\u201d": '"', "\u20ac": r"\$", "\u00a3": r"\$", "\u221a(": "sqrt(",
}  # fmt: skip

# In order: later patterns rely on earlier ones having run.
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<!\\)\\\\(?=(?:left|right|frac|dfrac|sqrt|pi|text|cdot|times|infty)(?![A-Za-z]))"), r"\\"),
    (re.compile(r"\\(?:[lc]?dots[cbmio]?|dotso)(?![A-Za-z])|\.{3,}|\u2026"), r"\\ldots "),
    (re.compile(r"!=|\\neq?(?![A-Za-z])|\\not\s*="), r"\\ne "),
    (re.compile(r"(?<=[\d)\]}])(?:or|and)(?=[\d(\[A-Z\\])"), ","),
    (re.compile(r"\u221a\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:left|right)\s*\."), ""),
    (re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|bigg|Bigg)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it)(?![A-Za-z])"), ""),
    (re.compile(r"\\[hv]space\*?\{[^{}]*\}"), " "),
    (re.compile(r"(?<!\\)\\!\s*"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;:> ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|thinspace(?![A-Za-z]))"), " "),
    (re.compile(r"(?<!\\)~"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\(?:leqslant|leqq|leq|le)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geqq|geq|ge)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:langle|rangle)(?![A-Za-z])"), lambda m: "(" if m[0] == r"\langle" else ")"),
    (re.compile(r"\\l(?:brack|vert|Vert)(?![A-Za-z])"), lambda m: "[" if m[0] == r"\lbrack" else "|"),
    (re.compile(r"\\r(?:brack|vert|Vert)(?![A-Za-z])"), lambda m: "]" if m[0] == r"\rbrack" else "|"),
    (re.compile(r"\\(?:math(?:rm|it|bf|sf|tt)|boldsymbol|bm|operatorname\*?)\s*\{\s*([A-Za-z])\s*\}"), r"\1"),
    (re.compile(r"\\(?:mbox|hbox|text(?:rm|bf|it|sf|tt|normal)|math(?:rm|bf|it|sf|tt)|operatorname\*?)(?=\s*\{)"), r"\\text"),  # noqa: E501
    (re.compile(r"\\text\s*\{\s*([+-]?[\d.,]+)\s*\}"), r"\1"),
    (re.compile(r"^\s*\\approx(?![A-Za-z])"), ""),
    (re.compile(r"\\varnothing(?![A-Za-z])|^\s*\\\{\s*\\\}\s*$"), r"\\emptyset"),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"\\text\s*\{\s*,?\s*(and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"), ","),
    (re.compile(r",(?:\s*,)+"), ","),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), r"^{\\circ}"),
    (re.compile(r"\\(frac|binom)\s*(\d|[A-Za-z]|\\pi)\s*(\d|[A-Za-z]|\\pi)"), r"\\\1{\2}{\3}"),
    (re.compile(r"\\(frac|binom)\s*(\d|[A-Za-z])\s*\{"), r"\\\1{\2}{"),
    (re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d|[A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\(frac|binom)\s+\{"), r"\\\1{"),
    (re.compile(r"\\sqrt\s*(\d|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(\\(?:frac|binom)\{[^{}]*\})\s+\{"), r"\1{"),
]  # fmt: skip
# Sets that answers name in words, by the words.
WORDS_FOR_SETS = {
    "all real numbers": r"\mathbb{R}", "all reals": r"\mathbb{R}", "real numbers": r"\mathbb{R}",
    "the real numbers": r"\mathbb{R}", "the set of all real numbers": r"\mathbb{R}", "every real number": r"\mathbb{R}",
    "any real number": r"\mathbb{R}", "all integers": r"\mathbb{Z}", "integers": r"\mathbb{Z}",
    "the integers": r"\mathbb{Z}", "the set of all integers": r"\mathbb{Z}", "all rational numbers": r"\mathbb{Q}",
    "rational numbers": r"\mathbb{Q}", "all natural numbers": r"\mathbb{N}", "natural numbers": r"\mathbb{N}",
    "all complex numbers": r"\mathbb{C}", "complex numbers": r"\mathbb{C}",
    "empty set": r"\emptyset", "the empty set": r"\emptyset", "no solution": r"\emptyset",
    "no solutions": r"\emptyset", "no real solution": r"\emptyset", "no real solutions": r"\emptyset",
    "there is no solution": r"\emptyset", "there are no solutions": r"\emptyset",
}  # fmt: skip
_SPACES = re.compile(r"\s+")
_OPENING, _CLOSING = "([{", ")]}"


def clean(text: str) -> str:
    """Return `text` with one form of delimiters, spacing commands and spelling variants; its meaning is unchanged.

    Dollar signs that delimit mathematics go; `\\$` (money) stays. A box around everything is opened.
    """
    for character, latex in _CHARACTERS.items():
        text = text.replace(character, latex)
    text = text.replace(r"\$", "\x00").replace("$", " ").replace("\x00", r"\$")
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SPACES.sub(" ", text).strip().strip(",;").rstrip(".").rstrip(",;:").strip()
    for command in (r"\boxed{", r"\fbox{"):
        if text.startswith(command) and matching_brace(text, len(command) - 1) == len(text) - 1:
            return clean(text[len(command) : -1])
    return WORDS_FOR_SETS.get(words(text), text) if r"\text" in text or text.replace(" ", "").isalpha() else text


def matching_brace(text: str, opening: int) -> int:
    """Return index of the brace that closes `text[opening]`; -1 where none does. Escaped braces do not count."""
    return next((index for index, depth in _brace_depths(text, opening) if depth == 0), -1)


def is_balanced(text: str) -> bool:
    """Return whether curly braces pair up (round and square ones need not: `(3, 4]` is an interval)."""
    depths = [0, *(depth for _, depth in _brace_depths(text, 0))]
    return min(depths) == depths[-1] == 0


def _brace_depths(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Yield (index, depth behind it) of every curly brace from `start` on that is not escaped."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in "{}" and (index == 0 or text[index - 1] != "\\"):
            depth += 1 if text[index] == "{" else -1
            yield index, depth


def split_top_level(text: str, separators: str = ",;") -> list[str]:
    """Cut at separators outside all brackets; any opening bracket pairs with any closing one."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character in separators and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def bracketed(text: str) -> tuple[str, str, str] | None:
    """Return (opening, inside, closing) of the brackets around all of `text`; `\\{` and `\\}` are one bracket."""
    for opening, closing in ((r"\{", r"\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), ("{", "}")):
        if not (text.startswith(opening) and text.endswith(closing)) or len(text) < len(opening) + len(closing):
            continue
        depth = 0
        for index, character in enumerate(text):
            if character in _OPENING:
                depth += 1
            elif character in _CLOSING:
                depth -= 1
                if depth == 0 and index < len(text) - 1:
                    return None
        return (opening, text[len(opening) : -len(closing)].strip(), closing) if depth == 0 else None
    return None


def words(text: str) -> str:
    """Return `text` as plain lower-case words, without commands, braces and punctuation."""
    text = re.sub(r"\\text\s*", " ", text)
    text = re.sub(r"\\[A-Za-z]+|[{}$\\]", " ", text)
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))
