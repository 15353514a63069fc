r"""Questions of training sets that evaluation sets contain, also in other words.

Mirrors of a competition word its problems differently: some give the choices (A) to (E), others ask for an integer
("The final answer can be written in the form $\frac{m}{n}$, where … What is $m+n$?"), and all differ in small words.
Three rules find such a question, each on its own:

- letters and digits of the two texts are the same;
- so they are without the choices and without the request for a form of the answer;
- without these and without drawings, the digits are the same in the same order, at least `_MIN_DIGITS` of them, and so
  are most words (`_SAME_WORDS`). Problems from one template differ in their numbers and stay.

The same question in quite different words is not found.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

from tango_hpc.questions.data.prepare.rows import LATEX_DRESS, fingerprint, loosely_normalized

_MIN_DIGITS = 3
_SAME_WORDS = 0.8  # Dice's coefficient of the words as multisets
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_LETTER = re.compile(r"\(\s*([ABC])\s*\)")
_CHOICES = re.compile(r"\(A\).*\(B\).*\(C\).*", re.DOTALL)
_FORMS = (
    r"(?:the (?:final )?answer )?can be (?:written|expressed|simplified) (?:as|in the form)\b[^.?]*\bwhere\b",
    r"the (?:final )?answer can be\b",
    r"(?:express|enter|write|give|round) (?:the|your) (?:final )?answers?\b",
)
_REQUEST = re.compile(rf"\b(?:{'|'.join(_FORMS)}).*", re.DOTALL | re.IGNORECASE)
_BRACES = re.compile("[{}]")
_DIGIT = re.compile(r"\d")
_FRACTION = re.compile("[dt]frac")
_WORD = re.compile(r"[^\W\d_]+")


class HeldOut:
    """The questions of evaluation sets, each with the name of its set."""

    def __init__(self, questions: Iterable[tuple[str, str]] = ()) -> None:
        """Index `questions`: pairs of text and name of the set; of equal texts the first counts."""
        self.names: set[str] = set()
        self._by_text: dict[int, str] = {}
        self._by_digits: dict[str, list[tuple[list[str], str]]] = {}
        for question, name in questions:
            self.names.add(name)
            bare = core(question)
            # what goes before choices may be "Which of these is true?": by that alone no question is known
            for text in [question] if _CHOICES.search(_spelled(question)) else [question, bare]:
                self._by_text.setdefault(fingerprint(loosely_normalized(text)), name)
            digits, words = _digits_and_words(question, bare)
            if len(digits) >= _MIN_DIGITS:
                self._by_digits.setdefault(digits, []).append(([sys.intern(word) for word in words], name))

    def __bool__(self) -> bool:
        return bool(self.names)

    def find(self, question: str) -> str | None:
        """Return the evaluation set that has this question, in these words or others; None where none has."""
        bare = core(question)
        for text in (question, bare):
            if (name := self._by_text.get(fingerprint(loosely_normalized(text)))) is not None:
                return name
        digits, words = _digits_and_words(question, bare)
        for others, name in self._by_digits.get(digits, ()):
            shared = (Counter(words) & Counter(others)).total()
            if 2 * shared >= _SAME_WORDS * (len(words) + len(others)):
                return name
        return None


def core(question: str) -> str:
    """Return a question without its choices and without the request for a form of its answer; whole where nothing is
    left.
    """
    text = _REQUEST.sub(" ", _CHOICES.sub(" ", _spelled(question)))
    return text if text.strip() else question


def _spelled(question: str) -> str:
    return _LETTER.sub(r"(\1)", _BRACES.sub(" ", LATEX_DRESS.sub("", question)))


def _digits_and_words(question: str, bare: str) -> tuple[str, list[str]]:
    """Return the digits and words of a question without its drawings; `bare` is its core."""
    undrawn = _DRAWING.sub(" ", question)
    text = bare if undrawn == question else core(undrawn)
    return "".join(_DIGIT.findall(text)), _WORD.findall(_FRACTION.sub("frac", text.casefold()))
