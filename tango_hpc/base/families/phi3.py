"""Phi-3 and Phi-4-mini: fused projections, rotary positions of part of a head, factors for long contexts."""

from tango_hpc.base.families.family import Family

FAMILY = Family(
    "phi3",
    members=("microsoft/Phi-4-mini-instruct", "microsoft/Phi-3-mini-4k-instruct"),
    fused=True,
    windows="all",
    rope_partial=True,
    rope_types=("default", "longrope"),
)
