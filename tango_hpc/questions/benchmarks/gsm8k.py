"""GSM8K (Cobbe et al. 2021): school problems answered by one number, compared exactly."""

from tango_hpc.questions.benchmarks.base import Benchmark, graded_by

BENCHMARK = Benchmark("gsm8k", "GSM8K", "math", grade=graded_by("number"))
