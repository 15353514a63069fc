"""MATH-500 (Hendrycks et al. 2021; Lightman et al. 2023): competition problems with answers in LaTeX."""

from tango_hpc.questions.benchmarks.base import Benchmark

BENCHMARK = Benchmark("math500", "MATH-500", "math")
