"""The text models of Gemma 3: norms on both sides of a block, scaled embeddings, local layers between global ones."""

from collections.abc import Mapping
from typing import Any

from tango_hpc.base.families.family import Family, Scales


def _scales(config: Mapping[str, Any]) -> Scales:
    return Scales(
        attention=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        embedding=float(config["hidden_size"]) ** 0.5,
    )


FAMILY = Family(
    "gemma3_text",
    members=("google/gemma-3-1b-it", "google/gemma-3-270m-it"),
    norms="both",
    norm_adds_one=True,
    qk_norm="head",
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    windows="by kind",
    rope_by_kind=True,
    defaults={"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4},
    scales=_scales,
    also="scaled embeddings",
    refused=("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
)
