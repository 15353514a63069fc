"""BoardgameQA (Kazemi et al. 2023): does a conclusion follow from facts and rules that contradict each other?"""

from tango_hpc.benchmarks.base import Benchmark, Row
from tango_hpc.grading.pool import GradeItem

_REQUEST = (
    "Answer with one word: proved if the statement in the question follows, disproved if its negation follows, "
    "unknown if neither can be derived."
)
_OPTIONS = {"labels": ["proved", "disproved", "unknown"], "synonyms": {"yes": "proved", "no": "disproved"}}


def _statement(row: Row) -> str:
    return f"{row['question']}\n\n{_REQUEST}"


def _grade(row: Row, answer: str) -> GradeItem:
    return GradeItem("label", row["answer"], answer, dict(_OPTIONS))


BENCHMARK = Benchmark("boardgameqa", "BoardgameQA", "out_of_domain", statement=_statement, grade=_grade)
