"""Starts a program on ranks, keeps it alive on Slurm or on one machine, and says what became of it."""
