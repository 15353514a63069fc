"""The number of gold answers that the grader accepts when the reference solutions give them in our own format.

    python -m tools.grader_acceptance data/eval

The program reads prepared files (math500, olympiadbench, gsm8k, ...) and writes each reference solution's final answer
as `<think>…</think><answer>\\boxed{…}</answer>`. It reads this text as a model's response and grades it. The table
lists the answers that are not accepted with the outcome of grading.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tango_hpc.base.errors import UserError
from tango_hpc.questions import benchmarks
from tango_hpc.questions.data.prepare.rows import SCHEMA, read_metadata
from tango_hpc.questions.data.tables import read_rows
from tango_hpc.questions.grading.pool import GradingPool
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.tags import last_box


@dataclass(frozen=True)
class Acceptance:
    """`failures` holds (row id, gold answer, answer read from the response, reason)."""

    name: str
    num_rows: int
    failures: list[tuple[str, str, str | None, str]]

    @property
    def share(self) -> float:
        """Share of gold answers that are accepted."""
        return 1 - len(self.failures) / self.num_rows


def measure(name: str, rows: list[dict[str, Any]], pool: GradingPool) -> Acceptance:
    """Grade the reference solutions of prepared rows of benchmark `name`."""
    benchmark = benchmarks.get_benchmark(name)
    answers = [benchmark.extract(parse_solution(reference_response(row))) for row in rows]
    given = [(row, answer) for row, answer in zip(rows, answers, strict=True) if answer is not None]
    verdicts = iter(pool.grade([benchmark.grade(row, answer) for row, answer in given]))
    failures: list[tuple[str, str, str | None, str]] = []
    for row, answer in zip(rows, answers, strict=True):
        if answer is None:
            failures.append((row["id"], row["answer"], None, "no answer is read from the response"))
            continue
        verdict = next(verdicts)
        if not verdict.correct:
            failures.append((row["id"], row["answer"], answer, f"not accepted ({verdict.outcome})"))
    return Acceptance(name, len(rows), failures)


def reference_response(row: dict[str, Any]) -> str:
    """Return the reference solution as a response: its own last box where it has one, else the reference answer."""
    solution = read_metadata(row).get("solution") or "The solution is not given."
    answer = last_box(solution) or row["answer"]
    return f"<think>\n<step>{solution}</step>\n</think>\n<answer>\\boxed{{{answer}}}</answer>"


def main(folder: Path) -> int:
    """Print the table; 1 if a set stays below 99.5%."""
    files = [folder / f"{name}.parquet" for name in benchmarks.NAMES if name != "processbench"]
    files = [file for file in files if file.is_file()]
    if not files:
        raise UserError(f"{folder} holds no prepared sets; make them with tango data, e.g. {folder}/math500.parquet")
    lowest = 1.0
    with GradingPool() as pool:
        for file in files:
            result = measure(file.stem, read_rows(file, tuple(SCHEMA.names)), pool)
            lowest = min(lowest, result.share)
            accepted = result.num_rows - len(result.failures)
            print(f"{result.name:14} {accepted:5} of {result.num_rows:5} accepted  {100 * result.share:6.2f}%")
            for row_id, gold, answer, reason in result.failures:
                print(f"    {row_id}: {gold!r} read as {answer!r}: {reason}")
    return int(lowest < 0.995)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        sys.exit(f"acceptance: {error}")
