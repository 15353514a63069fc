"""StrategyQA (Geva et al. 2021): yes-or-no questions whose answer needs several facts."""

from tango_hpc.benchmarks.base import Benchmark, Row
from tango_hpc.grading.pool import GradeItem

_OPTIONS = {"labels": ["yes", "no"], "synonyms": {"true": "yes", "false": "no"}}


def _statement(row: Row) -> str:
    return f"{row['question']}\n\nAnswer yes or no."


def _grade(row: Row, answer: str) -> GradeItem:
    return GradeItem("label", row["answer"], answer, dict(_OPTIONS))


BENCHMARK = Benchmark("strategyqa", "StrategyQA", "out_of_domain", statement=_statement, grade=_grade)
