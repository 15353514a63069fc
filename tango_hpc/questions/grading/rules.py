"""The grading rules by name. Each but `own` is a predicate on (gold, answer); a benchmark names its rule and options.

`math` is the only one of ours that evaluates expressions; the others are exact and quick, and run in any process. Where
one of them raises all the same, a worker process decides like for `math`. `own` and `own_steps` call the code of a
user's own task, which may do anything.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from tango_hpc.questions.grading import own_code
from tango_hpc.questions.grading.latex import clean, split_top_level, words
from tango_hpc.questions.grading.numbers import plain_number
from tango_hpc.questions.grading.units import split_unit

MAX_ANSWER_CHARACTERS = 4000  # the longest gold answer of the supported sets has 260

# A grade with its score only by the rule own; labels of steps, or None, only by own_steps.
Rule = Callable[..., bool | own_code.Graded | list[int] | None]


def number(gold: str, answer: str) -> bool:
    """GSM8K: one plain number; commas, currency, a unit or a percent sign do not matter, its exact value does."""
    gold_value, answer_value = _number_in(gold), _number_in(answer)
    return gold_value is not None and gold_value == answer_value


def label(gold: str, answer: str, labels: Sequence[str], synonyms: Mapping[str, str] | None = None) -> bool:
    """Yes or no, true or false: exactly one of `labels` (or its synonym) must be the whole answer, as of the
    gold one.
    """
    given, wanted = ((synonyms or {}).get(text, text) for text in (words(clean(answer)), words(gold)))
    return given in labels and given == wanted


def choice(gold: str, answer: str) -> bool:
    """Compare a letter with the gold one, with or without parentheses, a full stop or its text behind it:
    `(C)`, `C.`, `C) 12`.
    """
    match = re.match(r"\W*(?:text\W*)?([A-Za-z])(?![A-Za-z0-9])", clean(answer))
    return match is not None and match[1].upper() == words(gold).upper()


def literal(gold: str, answer: str) -> bool:
    """CRUXEval: two Python literals that Python calls equal, so that 1, 1.0 and True are one; nothing is executed.

    What is no literal is its own text: a string without its quotes counts.
    """
    return bool(answer.strip()) and _value(gold) == _value(answer)


def table(gold: str, answer: str) -> bool:
    """TableBench: cells separated by commas in any order, each an equal number or equal words.

    `100,200` is a number, or, where several cells are asked for, may be two.
    """
    wanted = sorted(map(_cell, _cells(gold)))
    several = [split_top_level(clean(answer), ",;")] if len(wanted) > 1 else []
    return any(sorted(map(_cell, cells)) == wanted for cells in (_cells(answer), *several))


def math(gold: str, answer: str, **options) -> bool:
    """Compare mathematical answers: see `mathematics.same_answer`. May never return: run it in a `GradingPool`."""
    from tango_hpc.questions.grading.mathematics import same_answer

    return same_answer(gold, answer, **options)


RULES: dict[str, Rule] = {
    "math": math, "number": number, "label": label, "choice": choice, "literal": literal, "table": table,
    "own": own_code.grade, "own_steps": own_code.label_steps,
}  # fmt: skip


def shortcut(rule: str, gold: str, answer: str, options: Mapping[str, object]) -> bool | None:
    """Return the verdict where no expression needs evaluating; None where a worker process must decide.

    An answer beyond `MAX_ANSWER_CHARACTERS` is wrong: no reference comes near it.
    """
    if rule in ("own", "own_steps"):
        return None
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    if rule != "math":
        try:
            return bool(RULES[rule](gold, answer, **options))
        except Exception:  # whatever a hostile answer breaks: the worker's verdict says so, and is counted
            return None
    if gold.strip() and gold.strip() == answer.strip():
        return True
    if not answer.strip():
        return False
    gold_value = plain_number(gold)
    if not options.get("several") and gold_value is not None and gold_value == plain_number(answer):
        return True
    if re.fullmatch(r"\s*-?\d+\s*", gold) and re.fullmatch(r"\s*-?\d+\s*", answer) and options.get("tolerance") is None:
        return False  # two whole numbers that differ: the usual case of a wrong answer
    return None


_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NOT_A_NOUN = frozenset(
    ("and", "or", "to", "plus", "minus", "times", "half", "halves", "third", "thirds", "quarter", "quarters", "fifth",
     "fifths", "tenths", "hundredths", "squared", "cubed", "mod", "log", "sin", "cos", "tan", "pi")
)  # fmt: skip
_COUNTED = re.compile(r"((?:\\?\$)?\s*[+-]?\s*(?:\\?\$)?\s*[\d.,/ ]*\d[\d.,]*)\s*([A-Za-z][A-Za-z .'/-]*)")


def _number_in(text: str) -> Fraction | None:
    """Return the one number in an answer without what it counts: `5 apples`, `\\text{18 dollars}`, `2 dozen`."""
    text = re.sub(r"^[A-Za-z]\w*\s*=\s*", "", clean(text))
    value = plain_number(split_unit(text)[0])
    counted = _COUNTED.fullmatch(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip())
    if value is not None or counted is None:
        return value
    first, *others = re.findall(r"[a-z]+", counted[2].casefold())
    scale = _SCALES.get(first, 1)
    nouns = others if first in _SCALES else [first, *others]
    number = plain_number(counted[1].replace(r"\$", "").replace("$", "").strip().rstrip(".,"))
    return None if number is None or set(nouns) & (_NOT_A_NOUN | _SCALES.keys()) else number * scale


def _value(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python about how the answer is written
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text.strip()


def _cells(text: str) -> list[str]:
    text = re.sub(r"(?<![\d,])(\d{1,3}(?:,\d{3})+)(?!\d)", lambda match: match[0].replace(",", ""), clean(text))
    return split_top_level(text, ",;")


def _cell(text: str) -> str:
    value = _number_in(text)
    if value is None:
        return words(text)
    try:
        return f"{float(value):.10g}"
    except OverflowError:  # of 400 digits, or 1e999
        return str(value)
