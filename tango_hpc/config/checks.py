"""Combinations of settings that cannot work, found before anything loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tango_hpc.config.schema import Config, ModelConfig, ParallelConfig, RoleConfig
from tango_hpc.model.published import published_dimensions

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def find_conflicts(config: Config) -> list[str]:
    """Every impossible combination as one line that starts with the key's path; empty where all is well."""
    return list(_conflicts(config))


def model_dimensions(model: ModelConfig, config: Config) -> dict[str, Any] | None:
    """The Hugging Face config of `model`: of its folder, of what `sft` will make it from, of `model.build`, or as
    published; None where all are unknown.
    """
    file = model.path / "config.json"
    if file.is_file():
        return json.loads(file.read_text())
    for tuning in (config.sft.generator, config.sft.verifier):
        if tuning is not None and tuning.output == model.path != tuning.init.path:
            return model_dimensions(tuning.init, config)
    if model.build is None:
        return published_dimensions(model.path.name)
    tiny = model.build
    return {
        "model_type": tiny.family,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "max_position_embeddings": tiny.max_position,
        "tie_word_embeddings": tiny.tie_embeddings,
    }


def _conflicts(config: Config) -> Iterator[str]:
    world = config.world_size
    for name, role in config.roles.items():
        yield from _role_conflicts(name, role, config)
    if world % config.rollout.tensor:
        yield f"rollout.tensor: {config.rollout.tensor} does not divide the {world} ranks (nodes * tasks_per_node)"
    for role_name in ("generator", "verifier"):
        sft = getattr(config.sft, role_name)
        tuned = config.roles.get(role_name)
        if sft is None:
            continue
        if tuned is None:
            yield f"sft.{role_name}: given, but there is no {role_name}"
            continue
        data_size = world // (tuned.parallel.tensor * tuned.parallel.pipeline)
        if data_size and sft.batch_size % data_size:
            yield f"sft.{role_name}.batch_size: {sft.batch_size} is not divisible by {data_size} data-parallel ranks"
        if sft.init.path == sft.output:
            yield f"sft.{role_name}.output: is sft.{role_name}.init.path; the starting weights would be lost"
        yield from _model_conflicts(f"sft.{role_name}.init", sft.init, tuned.parallel, config)
    train = config.train
    if config.verifier is None and train.verifier_warmup_steps:
        yield "train.verifier_warmup_steps: must be 0 without a verifier"
    if config.verifier is None and train.verifier_steps_per_cycle:
        yield "train.verifier_steps_per_cycle: must be 0 without a verifier"
    if config.verifier is not None and not config.verifier.trainable:
        for key in ("verifier_warmup_steps", "verifier_steps_per_cycle"):
            if getattr(train, key):
                yield f"train.{key}: must be 0 with verifier.trainable false"
    if not config.generator.trainable and not (train.verifier_steps_per_cycle or train.verifier_warmup_steps):
        yield "generator.trainable: false, and the verifier takes no steps either: nothing would be trained"
    if config.algorithm.alpha_end > config.algorithm.alpha_start:
        yield f"algorithm.alpha_end: {config.algorithm.alpha_end} is above alpha_start {config.algorithm.alpha_start}"
    if config.algorithm.alpha_start > 0 and config.algorithm.alpha_end == 0:
        yield "algorithm.alpha_end: an exponential decay never reaches 0; give a small number such as 1e-3"
    if config.launch.device == "cpu" and config.rollout.kv_cache_gb is None:
        yield "rollout.kv_cache_gb: required with launch.device cpu, e.g. 0.5"
    if "processbench" in config.eval.benchmarks and config.verifier is None:
        yield "eval.benchmarks: processbench asks the verifier, and there is none"
    if config.teacher is not None and config.teacher.shard >= config.teacher.num_shards:
        yield f"teacher.shard: {config.teacher.shard} is not below num_shards {config.teacher.num_shards} (they count from 0)"
    synthetic = config.task.last_letter
    if config.task.name != "last_letter" and synthetic is not None:
        yield f"task.last_letter: given, but task.name is {config.task.name}"
    if synthetic is not None:
        for key in ("sft_words", "sft_letters", "train_words", "train_letters", "eval_words", "eval_letters"):
            low, high = getattr(synthetic, key)
            if low > high:
                yield f"task.last_letter.{key}: [{low}, {high}] is not from low to high"
    if config.launch.grace_seconds >= config.launch.hang_timeout_seconds:
        yield "launch.grace_seconds: must be below launch.hang_timeout_seconds"


def _role_conflicts(name: str, role: RoleConfig, config: Config) -> Iterator[str]:
    split = role.parallel.tensor * role.parallel.pipeline
    if config.world_size % split:
        yield (
            f"{name}.parallel: tensor {role.parallel.tensor} * pipeline {role.parallel.pipeline} does not divide "
            f"the {config.world_size} ranks (launch.nodes * launch.tasks_per_node)"
        )
    else:
        data_size = config.world_size // split
        responses = config.train.questions_per_step * config.train.rollouts_per_question
        if role.trainable and responses % data_size:
            yield (
                f"train.questions_per_step: {responses} responses of a step are not divisible by the "
                f"{data_size} data-parallel ranks of the {name}"
            )
    length = role.max_prompt_tokens + role.max_response_tokens
    if role.micro_batch_tokens < length:
        yield (
            f"{name}.micro_batch_tokens: {role.micro_batch_tokens} cannot hold one sequence of max_prompt_tokens + "
            f"max_response_tokens = {length}"
        )
    if config.rollout.max_batched_tokens < role.max_prompt_tokens:
        yield (
            f"rollout.max_batched_tokens: {config.rollout.max_batched_tokens} is below "
            f"{name}.max_prompt_tokens {role.max_prompt_tokens}"
        )
    dimensions = model_dimensions(role.model, config)
    if dimensions is None and not Path(role.model.path).exists() and getattr(config.sft, name) is None:
        yield f"{name}.model.path: no folder at {role.model.path}"
    if dimensions is not None:
        limit = dimensions.get("max_position_embeddings")
        if limit is not None and length > limit:
            yield (
                f"{name}.max_response_tokens: max_prompt_tokens + max_response_tokens = {length} is over the "
                f"model's {limit} positions"
            )
    yield from _model_conflicts(f"{name}.model", role.model, role.parallel, config)


def _model_conflicts(key: str, model: ModelConfig, parallel: ParallelConfig, config: Config) -> Iterator[str]:
    rollout_tensor = config.rollout.tensor
    try:
        dimensions = model_dimensions(model, config)
    except (OSError, json.JSONDecodeError) as error:
        yield f"{key}.path: cannot read {model.path / 'config.json'}: {error}"
        return
    if dimensions is None:
        return
    family = dimensions.get("model_type")
    if family not in ("qwen2", "qwen3", "llama"):
        yield f"{key}.path: model_type {family!r} is not supported; dense qwen2, qwen3 and llama are"
        return
    heads = dimensions["num_attention_heads"]
    kv_heads = dimensions.get("num_key_value_heads") or heads
    hidden, inner, layers = (dimensions[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    if dimensions.get("head_dim") is None and hidden % heads:
        yield f"{key}: hidden size {hidden} is not divisible by {heads} attention heads"
    head_size = dimensions.get("head_dim") or hidden // heads
    if config.launch.device == "cpu" and head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"{key}: heads of {head_size} numbers; vLLM on a CPU has attention for {sizes}"
    if heads % kv_heads:
        yield f"{key}: {heads} attention heads are not divisible by {kv_heads} key-value heads"
    for label, size in (("attention heads", heads), ("key-value heads", kv_heads), ("intermediate size", inner)):
        if size % parallel.tensor:
            yield f"{key}: {size} {label} cannot be split over parallel.tensor = {parallel.tensor}"
    if layers % parallel.pipeline:
        yield f"{key}: {layers} layers cannot be split over parallel.pipeline = {parallel.pipeline}"
    if heads % rollout_tensor:
        yield f"{key}: {heads} attention heads cannot be split over rollout.tensor = {rollout_tensor}"
    if kv_heads % rollout_tensor and rollout_tensor % kv_heads:
        yield f"{key}: {kv_heads} key-value heads neither split nor replicate over rollout.tensor = {rollout_tensor}"
