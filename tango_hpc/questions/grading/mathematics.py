"""Comparison of an answer in LaTeX or plain text with the gold answer: structure first, then values.

Lists of answers are unordered; ordered tuples, intervals, unions, matrices, equations, inequalities, named
values (`x = 5`), units, percents, bases and words each have their rule; what is left is an expression.
Runs in the worker processes of `pool.GradingPool`, because evaluating an expression may never end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import sympy

from tango_hpc.questions.grading import expressions
from tango_hpc.questions.grading.latex import bracketed, clean, is_balanced, split_top_level, words
from tango_hpc.questions.grading.numbers import looks_grouped, plain_number
from tango_hpc.questions.grading.structure import (
    IN_BASE,
    LETTER,
    NAMED,
    base_letter,
    inside_membership,
    interval_of,
    is_collection,
    is_words,
    items_of,
    name_of,
    rename_argument,
    spelling,
    tuple_of,
)
from tango_hpc.questions.grading.units import DEGREE, PERCENT, Unit, split_unit
from tango_hpc.questions.grading.written import (
    ELLIPSIS,
    named_point,
    quantity_of,
    ratio_of,
    repeating,
    same_time,
    time_of,
)

_RELATION = re.compile(r"[<>]|\\(?:le|ge|in|approx|equiv)(?![A-Za-z])")


def same_answer(gold: str, answer: str, *, tolerance: float | None = None, unit: str | None = None,
                several: bool = False) -> bool:  # fmt: skip
    """Return whether `answer` is right where `gold` is the reference.

    tolerance: allowed absolute error of a number (a benchmark's own rule); None asks for exactness.
    unit: the unit that the question asks for, where the gold answer does not repeat it.
    several: the gold answer lists several answers, so `100,200` are two numbers and not one.
    """
    if not is_balanced(answer):
        return False
    gold, answer = clean(gold), clean(answer)
    if not gold or not answer:
        return False
    gold, answer = _decimal_comma(gold, answer), _decimal_comma(answer, gold)
    if spelling(gold) == spelling(answer):
        return True
    if (repeating(gold) or repeating(answer)) is None and ELLIPSIS in gold + answer:
        return _same_series(gold, answer)  # 1, 2, 3, ... is not 1, 2, 3
    asked = split_unit(rf"1\text{{{unit.strip('$ ')}}}")[1] if unit else None
    return _Comparison(tolerance, asked).compare(gold, answer, several)


class _Comparison:
    """One comparison with its settings; every method compares (gold, answer), both cleaned.

    Those of one kind of answer give None where the two are not of that kind.
    """

    def __init__(self, tolerance: float | None, asked_unit: Unit | None) -> None:
        self.tolerance = tolerance
        self.asked_unit = asked_unit

    def compare(self, gold: str, answer: str, several: bool = False) -> bool:
        """Compare lists, unions and sets as unordered collections; anything else as a single answer."""
        gold_items, answer_items = items_of(gold, several), items_of(answer, several)
        if len(gold_items) == 1 and not is_collection(gold) and not several:
            answer_items = [answer] if looks_grouped(split_unit(answer)[0]) else answer_items
        if len(gold_items) == len(answer_items) == 1:
            return self.single(gold_items[0], answer_items[0])
        if len(gold_items) != len(answer_items):
            point = self._point_by_coordinates(gold_items, answer_items)
            if point is not None:
                return point
            answer_items = _distinct_points(answer_items)
            if len(gold_items) != len(answer_items):
                return self._by_parsed_sets(gold, answer)
        names = [name_of(item) for item in gold_items]
        if len(set(names)) == len(names) > 1 and None not in names:
            return self._record(gold_items, answer_items, names)
        if _matches(gold_items, answer_items, self.single):
            return True
        return self._by_parsed_sets(gold, answer)

    def single(self, gold: str, answer: str) -> bool:
        """Compare one answer with one: tuples, intervals, relations, named values and atoms."""
        if spelling(gold) == spelling(answer):
            return True
        gold, answer = inside_membership(gold), inside_membership(answer)
        for of_kind in (self._quantities, self._chains, self._points, self._times_and_ratios, self._intervals,
                        self._named_values, self._tuples):  # fmt: skip
            verdict = of_kind(gold, answer)
            if verdict is not None:
                return verdict
        if _is_equation(gold) or _is_equation(answer):
            return _is_equation(gold) and _is_equation(answer) and self._equations(gold, answer)
        return self.atom(gold, answer)

    def _chains(self, gold: str, answer: str) -> bool | None:
        """Compare by the last member of a chain `x = 2 + 3 = 5`, or of `2 + 3 = 5` beside a bare 5.

        A chain whose members differ is wrong.
        """
        ends = []
        for text, other in ((gold, answer), (answer, gold)):
            parts = split_top_level(text, "=")
            values = parts[1:] if NAMED.fullmatch(f"{parts[0]} = 0") and not parts[0].isdigit() else parts
            is_chain = len(parts) > 2 or (len(values) == 2 and not _is_equation(other))
            if not is_chain or len(values) < 2 or not all(values) or r"\ne" in text or _RELATION.search(text):
                ends.append(text)
            elif all(self.atom(left, right) for left, right in pairwise(values)):
                ends.append(values[-1])
            else:
                return False
        return None if ends == [gold, answer] else self.single(*ends)

    def _points(self, gold: str, answer: str) -> bool | None:
        """Compare `(x, y) = (2, 3)` with `(2, 3)`, or with `(y, x) = (3, 2)`."""
        (gold_names, gold_entries), (answer_names, answer_entries) = map(_entries_of_point, (gold, answer))
        if not (gold_names or answer_names) or not (gold_entries and answer_entries):
            return None
        if gold_names and answer_names and sorted(gold_names) == sorted(answer_names):
            answer_entries = [answer_entries[answer_names.index(name)] for name in gold_names]
        return len(gold_entries) == len(answer_entries) and all(map(self.single, gold_entries, answer_entries))

    def _point_by_coordinates(self, gold_items: list[str], answer_items: list[str]) -> bool | None:
        """Compare a point `(2, 3)` with its coordinates `x = 2, y = 3`, in any order of their names."""
        for point, coordinates in ((gold_items, answer_items), (answer_items, gold_items)):
            names, entries = _entries_of_point(point[0]) if len(point) == 1 else (None, None)
            found = {name_of(item): NAMED.fullmatch(item) for item in coordinates}
            if entries and len(entries) == len(coordinates) == len(found) and None not in found:
                order = names or sorted(map(str, found))
                if sorted(order) != sorted(map(str, found)):
                    return False
                values = [match["value"].strip() for name in order if (match := found[name]) is not None]
                pairs = (entries, values) if point is gold_items else (values, entries)
                return all(map(self.single, *pairs))
        return None

    def _quantities(self, gold: str, answer: str) -> bool | None:
        """Compare a quantity that a figure names, `|AB| = 1`, with a bare value."""
        gold_value, answer_value = quantity_of(gold), quantity_of(answer)
        if gold_value is not None and "=" not in answer:
            return self.single(gold_value, answer)
        if answer_value is not None and "=" not in gold:
            return self.single(gold, answer_value)
        return None

    def _times_and_ratios(self, gold: str, answer: str) -> bool | None:
        """Compare two times of the day digit by digit, and two ratios by proportion."""
        gold_time, answer_time = time_of(gold), time_of(answer)
        if gold_time and answer_time:
            return same_time(gold_time, answer_time)
        gold_ratio, answer_ratio = ratio_of(gold), ratio_of(answer)
        if not gold_ratio or not answer_ratio or len(gold_ratio) == len(answer_ratio) == 2:
            return None
        return len(gold_ratio) == len(answer_ratio) and all(
            self._value(rf"({gold_ratio[0]})\cdot ({theirs})", rf"({answer_ratio[0]})\cdot ({ours})")
            for ours, theirs in zip(gold_ratio, answer_ratio, strict=True)
        )

    def _intervals(self, gold: str, answer: str) -> bool | None:
        """Compare two intervals: the same brackets around equal ends."""
        gold_interval, answer_interval = interval_of(gold), interval_of(answer)
        if gold_interval is None or answer_interval is None:
            return None
        same_brackets = gold_interval[::3] == answer_interval[::3]
        return same_brackets and all(map(self.single, gold_interval[1:3], answer_interval[1:3]))

    def _tuples(self, gold: str, answer: str) -> bool | None:
        """Compare two tuples or vectors entry by entry, other matrices as expressions; a tuple equals nothing else."""
        gold_tuple, answer_tuple = tuple_of(gold), tuple_of(answer)
        if gold_tuple and answer_tuple:
            return len(gold_tuple) == len(answer_tuple) and all(map(self.single, gold_tuple, answer_tuple))
        if r"\begin{" in gold + answer:
            return self._matrices(gold, answer)
        return False if gold_tuple or answer_tuple else None

    def _named_values(self, gold: str, answer: str) -> bool | None:
        """Compare `x = 5` with `x = 5` or a bare `5`, indices aside; `f(x) = 2x` with `f(t) = 2t`."""
        gold_match, answer_match = (NAMED.fullmatch(text) if _is_equation(text) else None for text in (gold, answer))
        if gold_match and answer_match and base_letter(gold_match["name"]) == base_letter(answer_match["name"]):
            return self.single(gold_match["value"].strip(), rename_argument(answer_match, gold_match).strip())
        if gold_match and not _is_equation(answer):
            return self.single(gold_match["value"].strip(), answer)
        if answer_match and not _is_equation(gold):
            return self.single(gold, answer_match["value"].strip())
        return None

    def atom(self, gold: str, answer: str) -> bool:
        """Compare one value, word, choice or number in a base, with its unit."""
        if gold_letter := LETTER.fullmatch(gold):
            answer_letter = LETTER.fullmatch(answer)
            if answer_letter:
                same = str.casefold if "(" in gold or "text" in gold else str
                return same(gold_letter[1]) == same(answer_letter[1])
        if is_words(gold):
            return words(gold) == words(answer)
        gold_base, answer_base = IN_BASE.fullmatch(gold), IN_BASE.fullmatch(answer)
        if gold_base or answer_base:
            return _same_digits(gold, gold_base, answer, answer_base)
        if ":" in gold + answer:
            return self._value(_quotient(gold), _quotient(answer))
        (gold_value, gold_unit), (answer_value, answer_unit) = split_unit(gold), split_unit(answer)
        return self._with_units(gold_value, gold_unit, answer_value, answer_unit)

    def _with_units(self, gold: str, gold_unit: Unit | None, answer: str, answer_unit: Unit | None) -> bool:
        """Compare two values with the units cut off them: units of one dimension are converted."""
        if gold_unit != answer_unit and {gold_unit, answer_unit} & {PERCENT, DEGREE}:
            one_sided = gold_unit is None or answer_unit is None
            return one_sided and self._sign_on_one_side(gold, gold_unit, answer, answer_unit)
        expected = gold_unit or self.asked_unit
        if not expected or not answer_unit:
            return self._value(gold, answer)
        scale = answer_unit.factor / expected.factor
        return expected.dimension == answer_unit.dimension and self._value(gold, answer, scale=scale)

    def _sign_on_one_side(self, gold: str, gold_unit: Unit | None, answer: str, answer_unit: Unit | None) -> bool:
        """Compare where one side alone writes percent or degrees: the sign is left out there, or `50%` is 1/2
        and `180^{\\circ}` is
        pi.
        """
        signed, bare = (gold, answer) if gold_unit else (answer, gold)
        in_degrees = DEGREE in (gold_unit, answer_unit)
        if in_degrees and r"\pi" in bare:
            return self._value(rf"({signed})\cdot\frac{{\pi}}{{180}}", bare)
        as_fraction = rf"\frac{{{signed}}}{{100}}"
        return self._value(gold, answer) or (not in_degrees and self._value(bare, as_fraction, exactly=True))

    def _value(self, gold: str, answer: str, *, scale: Fraction = Fraction(1), exactly: bool = False) -> bool:
        """Compare numbers and expressions: exactly where both are plain numbers, else by the parsed expressions."""
        gold, answer = _open_group(gold), _open_group(answer)
        gold_number, answer_number = _number(gold), _number(answer)
        # Of two decimals none rounds the other; else the decimal may round what is exact.
        rounding = 0.0 if _is_decimal(gold) and _is_decimal(answer) else _rounding(answer) or _rounding(gold)
        if gold_number is None or answer_number is None:
            return self._expressions(gold, answer, scale, rounding)
        distance = abs(gold_number - answer_number * scale)
        if distance <= Fraction(self.tolerance or 0) * Fraction(101, 100):
            return True
        # Else two exact numbers that differ, or two decimals, unless the answer rounds an exact gold number.
        return rounding > 0 and not exactly and distance <= Fraction(rounding) * abs(gold_number)

    def _expressions(self, gold: str, answer: str, scale: Fraction, rounding: float) -> bool:
        """Compare values and other objects as the parser reads them; only a number can be scaled to another unit."""
        gold_found, answer_found = expressions.read(_mixed(gold)), expressions.read(_mixed(answer))
        if gold_found is None or answer_found is None:
            return False
        if scale != 1:
            if not expressions.is_number(answer_found):
                return False
            answer_found = expressions.scaled(answer_found, scale)
        if expressions.same_value(gold_found, answer_found, tolerance=self.tolerance, rounding=rounding):
            return True
        if isinstance(gold_found, sympy.Expr) and isinstance(answer_found, sympy.Expr):
            return False
        return expressions.same_by_math_verify(gold_found, answer_found)

    def _matrices(self, gold: str, answer: str) -> bool:
        """Compare matrices as whole expressions (`\\frac{1}{3} A`, `-A`); a tuple stands for the column of its
        entries.
        """
        values: list[expressions.Readable | None] = []
        for text in (gold, answer):
            entries = None if r"\begin{" in text else tuple_of(text)
            text = r"\begin{pmatrix}" + r" \\ ".join(entries) + r"\end{pmatrix}" if entries else text
            values.append(expressions.read(text))
        if any(value is None for value in values):
            return False
        return expressions.same_value(*values, tolerance=self.tolerance)

    def _equations(self, gold: str, answer: str) -> bool:
        """Compare two equations with one solution set: one is a constant multiple of the other, or math-verify solves
        both.
        """
        sides = [text.split("=") for text in (gold, answer)]
        if all(len(parts) == 2 for parts in sides):
            differences = (expressions.read(f"({left})-({right})") for left, right in sides)
            values = [difference.doit() for difference in differences if isinstance(difference, sympy.Expr)]
            if len(values) == 2:
                gold_value, answer_value = values
                ratio = sympy.simplify(gold_value / answer_value) if answer_value != 0 else sympy.nan
                return bool(ratio.is_number and ratio.is_finite and ratio != 0)
        return self._by_parsed_sets(gold, answer)

    def _by_parsed_sets(self, gold: str, answer: str) -> bool:
        """Compare sets written in different pieces, such as overlapping unions: sympy's set algebra decides."""
        marks = (r"\cup", r"\cap", r"\setminus", r"\mathbb", "=")
        if tuple_of(gold) or tuple_of(answer) or not any(mark in gold + answer for mark in marks):
            return False
        gold_set, answer_set = expressions.read(gold), expressions.read(answer)
        if gold_set is None or answer_set is None:
            return False
        return expressions.same_by_math_verify(gold_set, answer_set)

    def _record(self, gold_items: list[str], answer_items: list[str], names: list[str | None]) -> bool:
        """Compare several values with different names: matched by name where the answer has names, else in order."""
        answer_names = [name_of(item) for item in answer_items]
        if sorted(map(str, answer_names)) == sorted(map(str, names)):
            answer_items = [answer_items[answer_names.index(name)] for name in names]
        return all(map(self.single, gold_items, answer_items))


def _matches(gold_items: list[str], answer_items: list[str], same: Callable[[str, str], bool]) -> bool:
    """Return whether the answers pair up with the gold ones, each used once. Equality is transitive, so greedy is
    enough.
    """
    remaining = list(answer_items)
    for gold in gold_items:
        found = next((index for index, answer in enumerate(remaining) if same(gold, answer)), None)
        if found is None:
            return False
        del remaining[found]
    return not remaining


def _is_equation(text: str) -> bool:
    """Return whether an equals sign stands outside of all brackets: that of a sum's index stands inside."""
    return "=" in text and len(split_top_level(text, "=")) > 1


def _decimal_comma(text: str, other: str) -> str:
    """Return `1000,99` as 1000.99 beside a number with a decimal point; anything else as it is."""
    is_so = plain_number(other) is not None and "." in other and not looks_grouped(text)
    return re.sub(r"^(-?\d+),(\d+)$", r"\1.\2", text) if is_so else text


def _number(text: str) -> Fraction | None:
    value = repeating(text)
    return plain_number(text) if value is None else value


def _same_series(gold: str, answer: str) -> bool:
    """Return whether two answers with an ellipsis are spelled alike, member by member."""
    members = [[spelling(part) for part in split_top_level(text)] for text in (gold, answer)]
    return members[0] == members[1] and ELLIPSIS in gold and ELLIPSIS in answer


def _entries_of_point(text: str) -> tuple[list[str] | None, list[str] | None]:
    """Return the names, where it has some, and the coordinates of a point."""
    named = named_point(text)
    return named if named is not None else (None, tuple_of(text))


def _distinct_points(items: list[str]) -> list[str]:
    """Return a list of points without those that stand in it twice; a list of anything else as it is."""
    if not all(tuple_of(item) for item in items):
        return items
    return list({spelling(item): item for item in items}.values())


def _quotient(text: str) -> str:
    """Return a ratio `a:b` as the fraction it stands for; anything else as it is."""
    parts = text.split(":")
    return rf"\frac{{{parts[0].strip()}}}{{{parts[1].strip()}}}" if len(parts) == 2 else text


def _same_digits(gold: str, gold_base: re.Match[str] | None, answer: str, answer_base: re.Match[str] | None) -> bool:
    """Compare numerals in a base. Where one side leaves the base to the question, its digits are what counts."""
    if gold_base and answer_base and (gold_base[2] or gold_base[3]) != (answer_base[2] or answer_base[3]):
        return False
    digits = [(match[1] if match else text).casefold() for match, text in ((gold_base, gold), (answer_base, answer))]
    return digits[0] == digits[1]


def _open_group(text: str) -> str:
    """Return `90` for `{90}` and `(90)`."""
    while (inside := bracketed(text)) and inside[0] + inside[2] in ("{}", "()") and inside[1]:
        text = inside[1]
    return text.strip()


def _is_decimal(text: str) -> bool:
    return re.search(r"\d\.\d|(?<!\d)\.\d", text) is not None


def _rounding(text: str) -> float:
    """Return how far, relatively, the longest decimal in the text may be from what it stands for; 0 below six
    significant digits.
    """
    found = ((whole + rest).lstrip("0") for whole, rest in re.findall(r"(\d*)\.(\d+)", text))
    digits = max(found, key=len, default="")
    return max(expressions.APPROXIMATE, 0.5 / float(digits)) if len(digits) >= 6 else 0.0


def _mixed(text: str) -> str:
    """Return whole numbers before proper fractions of whole numbers joined by a plus: the parser would multiply."""

    def join(match: re.Match[str]) -> str:
        whole, top, bottom = match.groups()
        return rf"({whole}+\frac{{{top}}}{{{bottom}}})" if int(top) < int(bottom) else match[0]

    return re.sub(r"(?<![\d.^_}])(\d{1,9})\s*\\frac\{\s*(\d{1,9})\s*\}\{\s*(\d{1,9})\s*\}", join, text)
