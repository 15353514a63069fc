"""Qwen3: norms of each head of queries and keys."""

from tango_hpc.base.families.family import Family

FAMILY = Family("qwen3", members=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"), qk_norm="head")
