"""CRUXEval (Gu et al. 2024), output prediction: what does a Python function return for an input?

The answer is a Python literal, compared by value; a string may lack its quotes. Its braces need not pair up inside
strings, so it is cut at the end of the answer element rather than at the brace that closes the box. Nothing is
executed.
"""

import re

from tango_hpc.questions.benchmarks.base import Benchmark, QuestionRow, graded_by
from tango_hpc.questions.protocol.solution import Solution, find_answer

_ANSWER = re.compile(r"<answer>\s*\\boxed\{(.*)\}\s*</answer>", re.DOTALL)


def _statement(row: QuestionRow) -> str:
    function, _, call = row["question"].rpartition("\n\n")
    return (
        f"Consider this Python function:\n\n```python\n{function}\n```\n\nWhat does `{call}` return? "
        "Give the value as a Python literal, strings in quotes, and nothing else in the box."
    )


def _extract(solution: Solution) -> str | None:
    match = _ANSWER.search(solution.answer_text)
    return match[1].strip() or None if match else find_answer(solution)


BENCHMARK = Benchmark(
    "cruxeval", "CRUXEval", "out_of_domain", statement=_statement, extract=_extract, grade=graded_by("literal")
)
