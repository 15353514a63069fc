"""BoardgameQA (Kazemi et al. 2023): does a conclusion follow from facts and rules that contradict each other?"""

from tango_hpc.questions.benchmarks.base import Benchmark, graded_by, question_with

BENCHMARK = Benchmark(
    "boardgameqa",
    "BoardgameQA",
    "out_of_domain",
    statement=question_with(
        "Answer with one word: True if the statement in the question follows, False if its negation follows, "
        "Uncertain if neither can be derived."
    ),
    grade=graded_by(
        "label",
        labels=["true", "false", "uncertain"],
        synonyms={"yes": "true", "no": "false", "proved": "true", "disproved": "false", "unknown": "uncertain"},
    ),
)
