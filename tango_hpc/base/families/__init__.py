"""The families of dense decoders that can be trained, one file each, by the `model_type` of config.json."""

from tango_hpc.base.families import gemma3_text, granite, llama, mistral, olmo2, olmo3, phi3, qwen2, qwen3, smollm3
from tango_hpc.base.families.family import Family, Scales

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (qwen2, qwen3, llama, mistral, olmo2, olmo3, smollm3, gemma3_text, phi3, granite)
}

__all__ = ["FAMILIES", "Family", "Scales"]
