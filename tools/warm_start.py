#!/usr/bin/env python3
r"""Data for a short warm start of a real model in our format: its own solutions, and checks of them by a calculator.

    python tools/warm_start.py easy data/gsm8k_train.parquet --out data/easy.parquet
    python tools/warm_start.py rows runs/samples/eval/model/task.parquet --out warm_start

`easy` keeps the questions of GSM8K whose reference solution has at most --calculations calculations (`<<4*3=12>>`
as its authors mark them).

`rows` reads the answers of a `tango eval` (greedy and sampled) and writes OUT/generator.parquet, the solutions that
keep the form and are right, each text of a question once, and OUT/verifier.parquet, as many right as wrong ones in
turn, with a verification: for each step whether its calculations come out, and at the end whether the answer is right.
Where the answer is wrong though all calculations come out, the last step is called incorrect: which one is, nobody
knows.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.questions.benchmarks.records import Answer, read_answers
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import CORRECT, INCORRECT

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
EQUATION = re.compile(r"([\d.(][\d\s.()+*/-]*[\d)])\s*=\s*(-?\d+(?:\.\d+)?)")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    easy = commands.add_parser("easy", help="the questions of few calculations")
    easy.add_argument("questions", type=Path)
    easy.add_argument("--calculations", type=int, default=2)
    rows = commands.add_parser("rows", help="fine-tuning data from the answers of an evaluation")
    rows.add_argument("answers", type=Path)
    for command in (easy, rows):
        command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    source = arguments.questions if arguments.command == "easy" else arguments.answers
    try:
        if arguments.command == "easy":
            keep_easy(source, arguments.calculations, arguments.out)
        else:
            write_rows(read_answers(source), arguments.out)
    except (OSError, pa.ArrowInvalid, KeyError, TypeError) as error:
        parser.error(f"{source} is no file of this kind: {error}")


def keep_easy(questions: Path, calculations: int, out: Path) -> None:
    """The rows of at most `calculations` calculations; the file keeps what it says of how it was made."""
    table = pq.read_table(questions)
    keep = [1 <= text.count("<<") <= calculations for text in table["metadata"].to_pylist()]
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.filter(pa.array(keep)), out)
    print(f"{out}: {sum(keep):,} of {len(keep):,} questions")


def write_rows(answers: list[Answer], out: Path) -> None:
    """Fine-tuning data of both roles."""
    # The same text twice teaches nothing more.
    formed = list({(a.question_id, a.response.strip()): a for a in answers if a.well_formed and a.finished}.values())
    right = [answer for answer in formed if answer.correct]
    wrong = [answer for answer in formed if not answer.correct]
    judged = [answer for pair in zip(right, wrong, strict=False) for answer in pair]
    out.mkdir(parents=True, exist_ok=True)
    solutions = [{"question": a.question, "solution_text": a.response.strip()} for a in right]
    checks = [
        {
            "question": a.question,
            "solution_text": a.response.strip(),
            "verification_text": verification(a.response, a.correct),
        }
        for a in judged
    ]
    pq.write_table(pa.Table.from_pylist(solutions), out / "generator.parquet")
    pq.write_table(pa.Table.from_pylist(checks), out / "verifier.parquet")
    print(f"{len(answers):,} answers, {len(formed):,} different ones in the form, {len(right):,} of these right")
    print(f"{out}: {len(solutions):,} rows for the generator, {len(checks):,} for the verifier")


def verification(response: str, correct: bool) -> str:
    """What a verifier should write of a solution of which only the outcome is known."""
    steps = [step.text for step in parse_solution(response).steps]
    checks = [check(step) for step in steps]
    if not correct and all(fits for _, fits in checks):
        checks[-1] = (f"{checks[-1][0]} This is not what was asked for.", False)
    lines = [
        f"<step>Step {k}: {words} {CORRECT if fits else INCORRECT}</step>" for k, (words, fits) in enumerate(checks, 1)
    ]
    verdict = CORRECT if correct else INCORRECT
    body = "\n".join(["<step_verification>", *lines, "</step_verification>"])
    return f"{body}\n<final_verification>{verdict}</final_verification>"


def check(step: str) -> tuple[str, bool]:
    """The calculations of a step done again, in words, and whether all come out."""
    words, fits = [], True
    for left, right in EQUATION.findall(step.replace(",", "").replace("$", "")):
        value = calculate(left)
        if value is None:
            continue
        close = abs(value - Fraction(right)) <= Fraction(1, 100)
        words.append(f"{left.strip()} = {right}." if close else f"{left.strip()} is not {right}.")
        fits = fits and close
    return " ".join(words) or "Nothing to calculate.", fits


def calculate(text: str) -> Fraction | None:
    """The value of sums and products of numbers; None where it is anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


if __name__ == "__main__":
    main()
