"""OLMo 2: norms after the blocks, and over all heads of queries and keys."""

from tango_hpc.base.families.family import Family

FAMILY = Family(
    "olmo2",
    members=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0425-1B-Instruct"),
    norms="after",
    qk_norm="all",
)
