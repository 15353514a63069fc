"""GSM8K (Cobbe et al. 2021): school problems answered by one number, compared exactly."""

from tango_hpc.benchmarks.base import Benchmark, Row
from tango_hpc.grading.pool import GradeItem


def _grade(row: Row, answer: str) -> GradeItem:
    return GradeItem("number", row["answer"], answer)


BENCHMARK = Benchmark("gsm8k", "GSM8K", "math", grade=_grade)
