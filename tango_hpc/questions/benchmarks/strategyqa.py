"""StrategyQA (Geva et al. 2021) with its facts: is a statement true, given what it follows from?"""

from tango_hpc.questions.benchmarks.base import Benchmark, graded_by, question_with

BENCHMARK = Benchmark(
    "strategyqa",
    "StrategyQA",
    "out_of_domain",
    statement=question_with("Answer True or False, by these facts."),
    grade=graded_by("label", labels=["true", "false"], synonyms={"yes": "true", "no": "false"}),
)
