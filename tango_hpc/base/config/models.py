"""The sizes of the models that a configuration names, also of those that are still to be made or downloaded."""

from __future__ import annotations

import json
from typing import Any

from tango_hpc.base.config.roles import ModelConfig, TinyModelConfig
from tango_hpc.base.config.schema import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.published import published_dimensions
from tango_hpc.base.tiny_language import vocabulary

SEED_FILE = (
    "built_from.json"  # beside the config.json of a tiny model: the seed of its weights and the characters it knows
)


def model_dimensions(model: ModelConfig, config: Config) -> dict[str, Any] | None:
    """Return the Hugging Face config of `model`: of its folder, of what `sft` will make it from, of `model.build`, or
    as published; None where all are unknown. Raises `UserError` for a config.json that cannot be read.
    """
    file = model.path / "config.json"
    if file.is_file():
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"cannot read {file}: {error}") from None
    for tuning in config.sft.models.values():
        if tuning.output == model.path != tuning.init.path:
            return model_dimensions(tuning.init, config)
    if model.build is None:
        return published_dimensions(model.path.name)
    return built_dimensions(model.build)


def built_dimensions(sizes: TinyModelConfig) -> dict[str, Any]:
    """Return the Hugging Face config of a tiny model that is built with these sizes."""
    return {
        "model_type": sizes.family,
        "vocab_size": len(vocabulary(sizes.characters)),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "max_position_embeddings": sizes.max_position,
        "tie_word_embeddings": sizes.tie_embeddings,
    }


def built_otherwise(model: ModelConfig, seed: int) -> str | None:
    """Return how the model in the folder of `model.build` differs from what is asked for; None where it is that, or
    missing.
    """
    file = model.path / "config.json"
    if model.build is None or not file.is_file():
        return None
    asked = built_dimensions(model.build)
    found = json.loads(file.read_text())
    if (seed_file := model.path / SEED_FILE).is_file():
        asked |= {"seed": seed, "characters": model.build.characters}
        found |= json.loads(seed_file.read_text())
    differing = [name for name in asked if found.get(name) != asked[name]]
    if not differing:
        return None
    there, here = (", ".join(f"{name} {values.get(name)}" for name in differing) for values in (found, asked))
    return f"the model in {model.path} was built with {there}; asked for is {here}"


def role_shape(config: Config, name: str) -> ModelShape:
    """Return the shape of a role's model. Raises `UserError` where its sizes are not known, or not supported."""
    model = config.roles[name].model
    dimensions = model_dimensions(model, config)
    if dimensions is None:
        raise UserError(f"{name}.model.path: no config.json in {model.path}; the plan needs the model's sizes")
    return ModelShape.from_hf_config(dimensions)
