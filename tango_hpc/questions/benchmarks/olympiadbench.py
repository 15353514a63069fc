"""OlympiadBench (He et al. 2024), English open-ended mathematics without images.

Its answers may be several, may have a unit that is asked for and not repeated, and in one case a tolerance. Mirrors
that do not say which answers are several have commas between them.
"""

from tango_hpc.questions.benchmarks.base import Benchmark, QuestionRow
from tango_hpc.questions.data.prepare.rows import read_metadata
from tango_hpc.questions.grading.latex import clean, split_top_level
from tango_hpc.questions.grading.pool import GradeItem


def _statement(row: QuestionRow) -> str:
    metadata = read_metadata(row)
    notes = []
    if _several(row):
        notes.append("If there are several answers, give all of them in one box, separated by commas.")
    if metadata.get("unit"):
        notes.append(f"The answer is asked for in this unit: {metadata['unit'].strip('$')}")
    return "\n\n".join([row["question"], *notes])


def _several(row: QuestionRow) -> bool:
    told = read_metadata(row).get("several")
    return bool(told) if told is not None else len(split_top_level(clean(row["answer"]), ",")) > 1


def _grade(row: QuestionRow, answer: str) -> GradeItem:
    metadata = read_metadata(row)
    options: dict[str, object] = {"several": _several(row), "unit": metadata.get("unit")}
    if metadata.get("error"):
        options["tolerance"] = float(metadata["error"])
    return GradeItem("math", row["answer"], answer, options)


BENCHMARK = Benchmark("olympiadbench", "OlympiadBench", "math", statement=_statement, grade=_grade)
