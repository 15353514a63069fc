"""TableBench (Wu et al. 2024), number reasoning and fact checking over one table: answers are cells or numbers."""

from tango_hpc.benchmarks.base import Benchmark, Row
from tango_hpc.grading.pool import GradeItem


def _statement(row: Row) -> str:
    return (
        f"{row['question']}\n\nAnswer with the number or the cell contents alone; separate several by commas. "
        "Round what is not a whole number to two decimals unless the question says otherwise."
    )


def _grade(row: Row, answer: str) -> GradeItem:
    return GradeItem("table", row["answer"], answer)


BENCHMARK = Benchmark("tablebench", "TableBench", "out_of_domain", statement=_statement, grade=_grade)
