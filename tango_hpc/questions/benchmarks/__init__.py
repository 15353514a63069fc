"""The evaluation sets of the paper: the statement, the extraction and the grading of each.

A set that needs code of its own has a module of its own.
"""

from __future__ import annotations

from tango_hpc.questions.benchmarks import cruxeval, olympiadbench, processbench
from tango_hpc.questions.benchmarks.base import Benchmark, graded_by, question_with

# In the order of the paper's tables.
_ALL = (
    # Competition problems with answers in LaTeX (Hendrycks et al. 2021; Lightman et al. 2023).
    Benchmark("math500", "MATH-500", "math"),
    # Both papers of a year: 30 problems, each answered by a whole number from 0 to 999 (`025` and `25` are one).
    Benchmark("aime24", "AIME 2024", "math"),
    Benchmark("aime25", "AIME 2025", "math"),
    # AMC 12: 40 problems without their multiple choice; answers are numbers.
    Benchmark("amc23", "AMC 2023", "math"),
    olympiadbench.BENCHMARK,
    # School problems (Cobbe et al. 2021) answered by one number, compared exactly.
    Benchmark("gsm8k", "GSM8K", "math", grade=graded_by("number")),
    # Does a conclusion follow from facts and rules that contradict each other (Kazemi et al. 2023)?
    Benchmark(
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
    ),
    cruxeval.BENCHMARK,
    # StrategyQA (Geva et al. 2021) with its facts: is a statement true, given the facts?
    Benchmark(
        "strategyqa",
        "StrategyQA",
        "out_of_domain",
        statement=question_with("Answer True or False, by these facts."),
        grade=graded_by("label", labels=["true", "false"], synonyms={"yes": "true", "no": "false"}),
    ),
    # StrategyQA without its facts: yes-or-no questions whose answer needs several facts.
    Benchmark(
        "strategyqa_plain",
        "StrategyQA without facts",
        "out_of_domain",
        statement=question_with("Answer yes or no."),
        grade=graded_by("label", labels=["yes", "no"], synonyms={"true": "yes", "false": "no"}),
    ),
    # Number reasoning and fact checking over one table (Wu et al. 2024): answers are cells or numbers.
    Benchmark(
        "tablebench",
        "TableBench",
        "out_of_domain",
        statement=question_with(
            "Answer with the number or the cell contents alone; separate several by commas. "
            "Round what is not a whole number to two decimals unless the question says otherwise."
        ),
        grade=graded_by("table"),
    ),
    processbench.BENCHMARK,
)
_BY_NAME = {benchmark.name: benchmark for benchmark in _ALL}
NAMES = tuple(_BY_NAME)


def get_benchmark(name: str) -> Benchmark:
    """Return the benchmark called `name`. Raises ValueError for a name that no benchmark has."""
    if name not in NAMES:
        raise ValueError(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
    return _BY_NAME[name]
