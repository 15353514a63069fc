"""Grading answers: exact rules for each benchmark, math-verify's mathematics in limited worker processes."""

from tango_hpc.questions.grading.pool import GradeItem, GradingPool, Verdict

__all__ = ["GradeItem", "GradingPool", "Verdict"]
