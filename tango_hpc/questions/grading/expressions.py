"""Values of mathematical expressions: read by the parser of math-verify, compared at high precision.

Only the worker process imports this module: evaluating what a model wrote may take for ever, and the
process limits are what ends it. Two expressions with variables are compared at fixed points, which decides
identities that `simplify` does not (factorials, floors, nested radicals) and takes milliseconds.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import TypeAlias

import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else a warning at each call without its own timeout

Readable: TypeAlias = sympy.Basic | sympy.MatrixBase

DIGITS = 60  # of every numeric evaluation
EQUAL = mpmath.mpf(10) ** -40  # relative distance below which two exact expressions are one number
APPROXIMATE = 2e-6  # relative distance allowed to any decimal of six good digits, also where rounding leaves it less
_REAL_POINTS = [sympy.Rational(p, q) for p, q in ((17, 7), (43, 19), (5, 3), (7, 23), (101, 9), (29, 31))]
_WHOLE_POINTS = [sympy.Integer(n) for n in (5, 12, 7, 3, 11, 4, 9, 2)]
_COUNTING = (sympy.factorial, sympy.binomial, sympy.Sum, sympy.Product)
_ROUNDING = (sympy.floor, sympy.ceiling, sympy.Mod)
_NAMES_OF_REAL_NUMBERS = "rstuvwxyz"

# Unlike math-verify's defaults: no units cut off (`2 m` may be a product), and R is not r.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_FOR_PARSER: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r"\\cdot "),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])(pi|sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan|infty)(?![A-Za-z])"), r"\\\1 "),  # noqa: E501
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"\^\s*(-?\d+)"), r"^{\1}"),
    (re.compile(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}"), r"(\\frac{\1\\pi}{180})"),
    (re.compile(r"(?<![\d.])(\d*)\.(\d+)"), lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}"),  # exactly
    (re.compile(r"\s+!"), "!"),
    (re.compile(r"((?:\d+|[A-Za-z]|\([^()]*\))!)\s*\^"), r"{(\1)}^"),
]  # fmt: skip
_DIVISORS = re.compile(
    r"\\(?:operatorname\s*\{\s*(?P<named>gcd|lcm)\s*\}|(?P<own>gcd|lcm))\s*(?:\\left\s*)?"
    r"\((?P<of>[^()\\]*)(?:\\right\s*)?\)"
)


def _as_letter(found: re.Match[str]) -> str:
    """Return a letter in place of the common divisor of letters, which the parser cannot take."""
    of = sorted("".join(part.split()) for part in found["of"].split(","))
    if not re.search("[A-Za-z]", "".join(of)):
        return found[0]
    letter = "G" if (found["named"] or found["own"]) == "gcd" else "L"
    return f"{letter}_{{{zlib.crc32(','.join(of).encode())}}}"


def read(text: str) -> Readable | None:
    """Return the expression that cleaned LaTeX or plain text stands for; None where the parser finds none."""
    for pattern, replacement in _FOR_PARSER:
        text = pattern.sub(replacement, text)
    text = _DIVISORS.sub(_as_letter, text)
    if re.search(r"\\(?:gcd|lcm)", text) and re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)):
        return None  # not in parentheses
    try:
        found = latex2sympy(text, normalization_config=_NORMALIZATION, conversion_config=_CONVERSION)
    except Exception:  # the parser raises errors of many kinds on what is no mathematics; that is its answer
        return None
    if isinstance(found, sympy.MatrixExpr):
        found = found.doit()
    return found if isinstance(found, sympy.Basic | sympy.MatrixBase) else None


def same_value(gold: Readable, answer: Readable, *, tolerance: float | None = None, rounding: float = 0.0) -> bool:
    """Return whether two expressions without or with variables have the same value everywhere they are both defined.

    `tolerance` is absolute and for numbers only (a benchmark's own); `rounding` is how far an answer
    that is written as a decimal may be from it, relatively. Relations, sets and tuples are not values: see
    `same_by_math_verify`.
    """
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _same_matrix(gold, answer, tolerance, rounding)
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    gold, answer = _with_imaginary_unit(gold, answer)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return _same_number(gold, answer, tolerance, rounding)
    return _same_at_points(gold, answer, symbols, rounding or EQUAL)


def _same_at_points(
    gold: sympy.Expr, answer: sympy.Expr, symbols: list[sympy.Symbol], relative: mpmath.mpf | float
) -> bool:
    agreed = zeros = 0
    for point in _points(gold, answer, len(symbols)):
        values = dict(zip(symbols, point, strict=True))
        left, right = _evaluate(gold.subs(values)), _evaluate(answer.subs(values))
        if left is None or right is None:
            continue
        if not _close(left, right, relative):
            if left.imag == right.imag == 0 or all(value > 0 for value in point):
                return False
            continue  # outside the real domain, roots and logarithms pick a branch: says nothing
        if left == right == 0:
            zeros += 1  # as far outside the range of a binomial: says nothing unless it is so everywhere
        else:
            agreed += 1
    return agreed >= 2 or (agreed == 0 and zeros >= 3)


def same_by_math_verify(gold: Readable, answer: Readable) -> bool:
    """Compare by math-verify: sets, relations and other things that are not values."""
    return bool(verify([gold], [answer], strict=True, timeout_seconds=None))


def is_number(expression: Readable) -> bool:
    """Return whether the expression has a value without knowing any variable."""
    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def scaled(expression: sympy.Expr, factor: sympy.Expr | Fraction) -> sympy.Expr:
    """Return `factor * expression`, unevaluated."""
    factor = sympy.Rational(factor.numerator, factor.denominator) if isinstance(factor, Fraction) else factor
    return sympy.Mul(factor, expression, evaluate=False)


def _with_imaginary_unit(gold: sympy.Expr, answer: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Read the letter i as the imaginary unit in both, where it is the only letter of the gold answer."""
    letter = sympy.Symbol("i")
    if gold.free_symbols | answer.free_symbols == {letter}:
        return gold.subs(letter, sympy.I), answer.subs(letter, sympy.I)
    return gold, answer


def _same_number(gold: sympy.Expr, answer: sympy.Expr, tolerance: float | None, rounding: float) -> bool:
    exact_gold, exact_answer = _exact(gold), _exact(answer)
    if exact_gold is not None and exact_answer is not None and tolerance is None and not rounding:
        return exact_gold == exact_answer
    left, right = _evaluate(gold), _evaluate(answer)
    if left is None or right is None:
        return gold == answer and gold not in (sympy.nan, sympy.zoo)
    if tolerance is not None and abs(left - right) <= tolerance * 1.01:
        return True
    return _close(left, right, rounding or EQUAL)


def _exact(expression: sympy.Expr) -> sympy.Expr | None:
    """Return the rational value of an expression of rational numbers; None for anything else."""
    if not all(atom.is_Rational for atom in expression.atoms(sympy.Number)) or expression.atoms(sympy.NumberSymbol):
        return None
    value = expression.doit()
    return value if value.is_Rational else None


def _evaluate(expression: sympy.Expr) -> mpmath.mpc | None:
    value = sympy.N(expression.doit(), DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    with mpmath.workdps(DIGITS):
        return mpmath.mpc(mpmath.mpf(str(sympy.N(real, DIGITS))), mpmath.mpf(str(sympy.N(imaginary, DIGITS))))


def _close(left: mpmath.mpc, right: mpmath.mpc, relative: mpmath.mpf | float) -> bool:
    with mpmath.workdps(DIGITS):
        return abs(left - right) <= relative * max(abs(left), abs(right), EQUAL)


def _points(gold: sympy.Expr, answer: sympy.Expr, num_symbols: int) -> list[tuple[sympy.Rational, ...]]:
    """Return points of the domain: whole numbers where an expression counts something, else rationals, some
    negative.
    """
    counts = gold.has(*_COUNTING) or answer.has(*_COUNTING) or _has_sign_power(gold, answer)
    if counts or gold.has(*_ROUNDING) or answer.has(*_ROUNDING):
        points = _drawn_from(_WHOLE_POINTS, num_symbols, rise=12)
        # n over k wants n the larger, whichever name sorts first
        points = points if num_symbols == 1 else [either for point in points for either in (point, point[::-1])]
        letters = gold.free_symbols | answer.free_symbols
        if counts or any(str(letter)[0] not in _NAMES_OF_REAL_NUMBERS for letter in letters):
            return points
        return points + _drawn_from(_REAL_POINTS, num_symbols)  # of whole numbers alone, x and its floor are one
    points = _drawn_from(_REAL_POINTS, num_symbols)
    if num_symbols == 1:
        return points + [(-value,) for (value,) in points[:3]]
    return points + [tuple(-value if sign else value for value, sign in zip(points[0], signs, strict=True))
                     for signs in list(product((0, 1), repeat=num_symbols))[1:4]]  # fmt: skip


def _drawn_from(base: list[sympy.Rational], num_symbols: int, rise: int = 0) -> list[tuple[sympy.Rational, ...]]:
    """Return a point for each place in `base`: coordinate j stands 2j places further on and is larger by j times
    `rise`.
    """
    return [
        tuple(base[(index + 2 * j) % len(base)] + rise * j for j in range(num_symbols)) for index in range(len(base))
    ]


def _has_sign_power(*expressions: sympy.Expr) -> bool:
    return any(
        power.base.is_number and power.base.is_negative and power.exp.free_symbols
        for expression in expressions
        for power in expression.atoms(sympy.Pow)
    )


def _same_matrix(gold: Readable, answer: Readable, tolerance: float | None, rounding: float) -> bool:
    if not (isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase)) or gold.shape != answer.shape:
        return False
    return all(
        same_value(left, right, tolerance=tolerance, rounding=rounding)
        for left, right in zip(gold.flat(), answer.flat(), strict=True)
    )
