"""Olmo 3: OLMo 2's layers, three of four with a window; only the others have scaled rotary positions."""

from tango_hpc.base.families.family import Family

FAMILY = Family(
    "olmo3",
    members=("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-7B-Think"),
    norms="after",
    qk_norm="all",
    windows="by kind",
    rope_by_kind=True,
)
