"""The evaluation sets of the paper: for each one file with its prompt, its extraction and its grading."""

from __future__ import annotations

import importlib

from tango_hpc.questions.benchmarks.base import Benchmark

# In the order of the paper's tables. The module of the same name holds BENCHMARK.
NAMES = (
    "math500", "aime24", "aime25", "amc23", "olympiadbench", "gsm8k",
    "boardgameqa", "cruxeval", "strategyqa", "strategyqa_plain", "tablebench", "processbench",
)  # fmt: skip


def get_benchmark(name: str) -> Benchmark:
    """Return the benchmark called `name`; its module is imported only now."""
    if name not in NAMES:
        raise ValueError(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f"tango_hpc.questions.benchmarks.{name}").BENCHMARK
