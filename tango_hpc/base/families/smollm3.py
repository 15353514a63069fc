"""SmolLM3: Llama's layers, one of four without positions."""

from tango_hpc.base.families.family import Family

FAMILY = Family(
    "smollm3",
    members=("HuggingFaceTB/SmolLM3-3B",),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
    also="layers without positions",
)
