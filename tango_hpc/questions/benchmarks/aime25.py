"""AIME 2025, both papers: 30 problems, each answered by a whole number from 0 to 999."""

from tango_hpc.questions.benchmarks.base import Benchmark

BENCHMARK = Benchmark("aime25", "AIME 2025", "math")
