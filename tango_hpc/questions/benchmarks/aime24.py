"""AIME 2024, both papers: 30 problems, each answered by a whole number from 0 to 999 (`025` and `25` are one)."""

from tango_hpc.questions.benchmarks.base import Benchmark

BENCHMARK = Benchmark("aime24", "AIME 2024", "math")
