"""Questions and answers: tasks, data sets, grading, benchmarks, and the form of a solution and of a verification."""
