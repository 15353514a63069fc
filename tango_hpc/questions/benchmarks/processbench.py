"""ProcessBench (Zheng et al. 2024): can a verifier find the first wrong step of a solution?

The solutions come with their own steps. Each is put into our format and judged like a generator's; the prediction is
the first step judged INCORRECT, -1 where every step is judged CORRECT, and none (always wrong) where a judgement
before the first INCORRECT one is missing. The score of a split is the harmonic mean of the accuracies on wrong and
on right samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from tango_hpc.questions.benchmarks.base import Benchmark, QuestionRow
from tango_hpc.questions.data.prepare.rows import read_metadata
from tango_hpc.questions.protocol.tags import last_box

ALL_RIGHT = -1


def solution_text(row: QuestionRow) -> str:
    """Return the sample's solution in our format; its answer is the last box that its steps give.

    Where none gives one there is no answer element: an empty box would be a mistake that the sample has not made.
    """
    steps = read_metadata(row)["steps"]
    answer = last_box("\n".join(steps))
    body = "\n".join(f"<step>{step}</step>" for step in steps)
    solution = f"<think>\n{body}\n</think>"
    return solution if answer is None else f"{solution}\n<answer>\\boxed{{{answer}}}</answer>"


def num_steps(row: QuestionRow) -> int:
    """Return steps of the sample's solution."""
    return len(read_metadata(row)["steps"])


def first_wrong_step(judgements: Sequence[int]) -> int | None:
    """Return the prediction for step judgements +1, -1 and 0 (missing); None where they do not give one."""
    for index, judgement in enumerate(judgements):
        if judgement == -1:
            return index
        if judgement == 0:
            return None
    return ALL_RIGHT


BENCHMARK = Benchmark("processbench", "ProcessBench", "verifier")
