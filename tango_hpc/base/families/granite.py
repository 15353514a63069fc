"""Granite 3: Llama's layers with constant factors."""

from collections.abc import Mapping
from typing import Any

from tango_hpc.base.families.family import Family, Scales


def _scales(config: Mapping[str, Any]) -> Scales:
    return Scales(
        attention=float(config.get("attention_multiplier", 1.0)),
        embedding=float(config.get("embedding_multiplier", 1.0)),
        residual=float(config.get("residual_multiplier", 1.0)),
        logits=1.0 / float(config.get("logits_scaling", 1.0)),
    )


FAMILY = Family("granite", members=("ibm-granite/granite-3.1-2b-instruct",), scales=_scales, also="constant factors")
