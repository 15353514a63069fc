"""AMC 12 2023: 40 problems with their multiple choice taken away; answers are numbers."""

from tango_hpc.questions.benchmarks.base import Benchmark

BENCHMARK = Benchmark("amc23", "AMC 2023", "math")
