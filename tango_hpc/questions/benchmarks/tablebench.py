"""TableBench (Wu et al. 2024), number reasoning and fact checking over one table: answers are cells or numbers."""

from tango_hpc.questions.benchmarks.base import Benchmark, graded_by, question_with

BENCHMARK = Benchmark(
    "tablebench",
    "TableBench",
    "out_of_domain",
    statement=question_with(
        "Answer with the number or the cell contents alone; separate several by commas. "
        "Round what is not a whole number to two decimals unless the question says otherwise."
    ),
    grade=graded_by("table"),
)
