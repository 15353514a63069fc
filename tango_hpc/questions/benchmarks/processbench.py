"""ProcessBench (Zheng et al. 2024): can a verifier find the first wrong step of a solution?

The solutions come with their own steps. Each is put into the run's form and judged like a generator's; the prediction
is the first step judged INCORRECT, -1 where every step is judged CORRECT, and none (always wrong) where a judgement
before the first INCORRECT one is missing. The score of a split is the harmonic mean of the accuracies on wrong and
on right samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from tango_hpc.base.config.schema import ProtocolConfig
from tango_hpc.questions.benchmarks.base import Benchmark, QuestionRow
from tango_hpc.questions.data.prepare.rows import read_metadata
from tango_hpc.questions.protocol.forms import given_solution
from tango_hpc.questions.protocol.solution import Solution
from tango_hpc.questions.protocol.tags import last_box

ALL_RIGHT = -1


def solution(row: QuestionRow, protocol: ProtocolConfig) -> Solution:
    """Return the sample's solution in the run's form; its answer is the last box that its steps give."""
    steps = read_metadata(row)["steps"]
    return given_solution(steps, last_box("\n".join(steps)), protocol)


def first_wrong_step(judgements: Sequence[int]) -> int | None:
    """Return the prediction for step judgements +1, -1 and 0 (missing); None where they do not give one."""
    for index, judgement in enumerate(judgements):
        if judgement == -1:
            return index
        if judgement == 0:
            return None
    return ALL_RIGHT


BENCHMARK = Benchmark("processbench", "ProcessBench", "verifier")
