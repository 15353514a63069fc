"""StrategyQA (Geva et al. 2021) without its facts: yes-or-no questions whose answer needs several facts."""

from tango_hpc.questions.benchmarks.base import Benchmark, graded_by, question_with

BENCHMARK = Benchmark(
    "strategyqa_plain",
    "StrategyQA without facts",
    "out_of_domain",
    statement=question_with("Answer yes or no."),
    grade=graded_by("label", labels=["yes", "no"], synonyms={"true": "yes", "false": "no"}),
)
