"""Combinations of settings that cannot work, found before anything loads.

What a model or the ranks allow is asked of the functions that cut them (`base.model_shape`,
`equations.alpha_schedule`), so that what is refused here is what would fail later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError

from tango_hpc.base.config.models import built_otherwise, model_dimensions
from tango_hpc.base.config.paths import NO_TEMPLATE_FILE
from tango_hpc.base.config.role_prompts import role_prompt
from tango_hpc.base.config.roles import ModelConfig, OptimizerConfig, RoleConfig
from tango_hpc.base.config.schema import Config, ProtocolConfig, SharedSftConfig, TrainConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape, check_parallel, check_rollout_tensor

# Steps are listed before the first one, and so are the responses of a step.
MOST_AT_ONCE = 10_000_000
_TEMPLATES = Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers has it for chat templates
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def find_conflicts(config: Config) -> list[str]:
    """Return every impossible combination as one line that starts with the key's path; empty where all is well."""
    return list(_conflicts(config))


def _conflicts(config: Config) -> Iterator[str]:
    for name, model in config.models.items():
        yield from _trainer_conflicts(name, model, config)
        yield from _engine_conflicts(name, model, config)
        yield from _optimizer_conflicts(f"{name}.optimizer", model.optimizer)
    for name, role in config.roles.items():
        yield from _role_conflicts(name, role, config)
    yield from _sft_conflicts(config)
    yield from _protocol_conflicts(config)
    yield from _training_conflicts(config)
    yield from _algorithm_conflicts(config)
    yield from _task_conflicts(config)
    if config.launch.grace_seconds >= config.launch.hang_timeout_seconds:
        yield "launch.grace_seconds: must be below launch.hang_timeout_seconds"
    if config.launch.collective_timeout_seconds <= config.launch.hang_timeout_seconds:
        yield (
            "launch.collective_timeout_seconds: must be above launch.hang_timeout_seconds "
            f"({config.launch.hang_timeout_seconds:g}), or ranks that wait give up before the one that hangs is named"
        )
    if config.launch.collective_timeout_seconds <= config.reshard.timeout_seconds:
        yield (
            f"reshard.timeout_seconds: {config.reshard.timeout_seconds:g} must be below"
            f" launch.collective_timeout_seconds ({config.launch.collective_timeout_seconds:g}), or NCCL ends a rank"
            " that waits in a weight sync before the rank has named its peer"
        )


def _sft_conflicts(config: Config) -> Iterator[str]:
    """Yield conflicts of what is fine-tuned with the models that there are."""
    sft = config.sft
    if sft.verifier is not None and config.verifier is None:
        yield "sft.verifier: given, but there is no verifier"
    elif sft.verifier is not None and isinstance(sft.verifier, SharedSftConfig) != config.is_one_model:
        needed = "{same_as: generator, data: FILE}" if config.is_one_model else "settings of a model of its own"
        yield f"sft.verifier: needs {needed}, as verifier has it"
    elif isinstance(sft.verifier, SharedSftConfig) and sft.generator is None:
        yield "sft.verifier: its rows are for the model that sft.generator fine-tunes, which is missing"
    for name, tuning in sft.models.items():
        if name not in config.models:
            continue
        if tuning.init.path == tuning.output:
            yield f"sft.{name}.output: is sft.{name}.init.path; the starting weights would be lost"
        yield from _model_conflicts(f"sft.{name}.init", tuning.init, config.models[name], config)
        yield from _optimizer_conflicts(f"sft.{name}.optimizer", tuning.optimizer)


def _protocol_conflicts(config: Config) -> Iterator[str]:
    """Yield settings of the protocol that nothing reads."""
    if config.protocol.solution == "tagged":
        for key in ("judge", "max_steps"):
            if getattr(config.protocol, key) != ProtocolConfig.model_fields[key].default:
                yield f"protocol.{key}: for protocol.solution free only; a tagged one has its <step> elements"


def _training_conflicts(config: Config) -> Iterator[str]:
    """Yield conflicts of the steps that are taken."""
    train = config.train
    steps = train.verifier_warmup_steps + train.generator_steps * (1 + train.verifier_steps_per_cycle)
    for what, count in {
        "verifier_warmup_steps, generator_steps and verifier_steps_per_cycle: steps of a run": steps,
        "questions_per_step, rollouts_per_question and verifications_per_solution: responses of a step": (
            train.questions_per_step * train.rollouts_per_question * train.verifications_per_solution
        ),
    }.items():
        if count > MOST_AT_ONCE:
            yield f"train.{what}, {count:,} in all, must be at most {MOST_AT_ONCE:,}"
    if config.verifier is None and train.verifier_warmup_steps:
        yield "train.verifier_warmup_steps: must be 0 without a verifier"
    if config.verifier is None and train.verifier_steps_per_cycle:
        yield "train.verifier_steps_per_cycle: must be 0 without a verifier"
    if config.verifier is not None and not config.verifier.trainable:
        for key in ("verifier_warmup_steps", "verifier_steps_per_cycle"):
            if getattr(train, key):
                yield f"train.{key}: must be 0 with verifier.trainable false"
    cycles = (train.generator_steps - 1) // train.generator_steps_per_cycle  # after which the verifier takes its steps
    if not config.generator.trainable and not (train.verifier_warmup_steps or cycles * train.verifier_steps_per_cycle):
        yield "generator.trainable: false, and the verifier takes no steps either: nothing would be trained"
    if train.verifier_learning_rate_scale != 1 and not config.is_one_model:
        yield (
            f"train.verifier_learning_rate_scale: {train.verifier_learning_rate_scale:g} is for one model in both roles"
            " (verifier.same_as); set verifier.optimizer.learning_rate"
        )
    yield from _joint_conflicts(config)
    if train.verifier_draws > 1 and (config.verifier is None or not config.verifier.trainable):
        yield f"train.verifier_draws: {train.verifier_draws} needs a verifier that is trained; set it to 1"
    if train.verified_majority and (config.verifier is None or train.majority_share is None):
        yield "train.verified_majority: true needs a verifier and train.majority_share"
    if config.verifier is None and train.verifications_per_solution > 1:
        yield f"train.verifications_per_solution: {train.verifications_per_solution} needs a verifier; set it to 1"


def _joint_conflicts(config: Config) -> Iterator[str]:
    """Yield conflicts of joint updates."""
    train = config.train
    if not train.joint:
        for key in ("joint_solutions", "joint_weight"):
            if getattr(train, key) != TrainConfig.model_fields[key].default:
                yield f"train.{key}: for joint updates only (train.joint)"
        return
    if not config.is_one_model:
        yield "train.joint: updates one model with both kinds of responses; that takes verifier.same_as: generator"
    elif not all(role.trainable for role in config.roles.values()):
        yield "train.joint: trains both roles, and one of them is not trainable"
    if train.verifier_steps_per_cycle:
        yield "train.verifier_steps_per_cycle: must be 0 with train.joint, whose steps train the verifier as well"
    num_solutions = train.questions_per_step * train.rollouts_per_question
    if train.num_joint_solutions > num_solutions:
        yield f"train.joint_solutions: {train.joint_solutions} of the {num_solutions} solutions of a step"


def _algorithm_conflicts(config: Config) -> Iterator[str]:
    """Yield conflicts of rewards and advantages."""
    algorithm = config.algorithm
    if config.verifier is None and algorithm.min_verifier_j is not None:
        yield f"algorithm.min_verifier_j: {algorithm.min_verifier_j} needs a verifier; set it to null"
    elif algorithm.min_verifier_j is not None and algorithm.alpha_start == 0:
        yield (
            f"algorithm.min_verifier_j: {algorithm.min_verifier_j} holds back the step advantages, which have no weight"
            " with algorithm.alpha_start 0; set it to null"
        )
    if algorithm.step_labels is not None and (config.verifier is None or not config.verifier.trainable):
        yield "algorithm.step_labels: are held against a verifier that is trained, and there is none; set it to null"
    if algorithm.alpha_start > 0 and algorithm.alpha_end > algorithm.alpha_start:
        yield f"algorithm.alpha_end: {algorithm.alpha_end} is above alpha_start {algorithm.alpha_start}"
    if config.verifier is None and algorithm.ground_truth_weight < 1:
        yield f"algorithm.ground_truth_weight: {algorithm.ground_truth_weight} needs a verifier; set it to 1"
    if algorithm.alpha_start > 0 and algorithm.alpha_end == 0 and algorithm.alpha_schedule == "exponential":
        yield "algorithm.alpha_end: an exponential decay never reaches 0; give a small number such as 1e-3"


def _task_conflicts(config: Config) -> Iterator[str]:
    """Yield conflicts of the task's own settings, of benchmarks and of the teacher's shards."""
    if "processbench" in config.eval.benchmarks and config.verifier is None:
        yield "eval.benchmarks: processbench asks the verifier, and there is none"
    if config.teacher is not None and config.teacher.shard >= config.teacher.num_shards:
        yield (
            f"teacher.shard: {config.teacher.shard} is not below num_shards {config.teacher.num_shards} (they count"
            " from 0)"
        )
    if config.teacher is not None and config.teacher.temperature == 0 and config.teacher.samples > 1:
        yield "teacher.samples: attempts at temperature 0 are all alike; give a temperature, or one sample"
    if config.teacher is not None and config.teacher.test_rows is not None and config.teacher.test_share is not None:
        yield "teacher.test_share: given beside teacher.test_rows; give one of them (the other null)"
    if config.task.settings and config.task.file is None:
        yield f"task.settings: given, but task.name is {config.task.name}; they are for addition and tasks of your own"
    synthetic = config.task.last_letter
    if config.task.name != "last_letter" and synthetic is not None:
        yield f"task.last_letter: given, but task.name is {config.task.name}"
    if synthetic is not None:
        for key in ("sft_words", "sft_letters", "train_words", "train_letters", "eval_words", "eval_letters"):
            low, high = getattr(synthetic, key)
            if low > high:
                yield f"task.last_letter.{key}: [{low}, {high}] is not from low to high"


def _trainer_conflicts(name: str, model: RoleConfig, config: Config) -> Iterator[str]:
    """Yield settings that a model's trainer cannot have."""
    split = model.parallel.tensor * model.parallel.pipeline
    if config.world_size % split:
        yield (
            f"{name}.parallel: tensor {model.parallel.tensor} * pipeline {model.parallel.pipeline} does not divide "
            f"the {config.world_size} ranks (launch.nodes * launch.tasks_per_node)"
        )
    if model.parallel.sequence and model.parallel.tensor == 1:
        yield (
            f"{name}.parallel.sequence: true, but with parallel.tensor 1 no rank has tokens to share out; set it to"
            " false"
        )
    if model.adapter is not None and not model.trainable:
        yield f"{name}.adapter: given, but {name}.trainable is false; set it to null"
    if model.adapter is not None and model.adapter.path is not None and name in config.sft.models:
        yield (
            f"{name}.adapter.path: training starts from what sft.{name} writes, whose weights have an adapter in them"
            " already; leave one of them out"
        )
    yield from _model_conflicts(f"{name}.model", model.model, model, config)


def _role_conflicts(name: str, role: RoleConfig, config: Config) -> Iterator[str]:
    """Yield settings of a role that cannot be, or that its model cannot meet."""
    if role.trainable and role.top_p < 1:
        yield (
            f"{name}.top_p: {role.top_p} with {name}.trainable: the engine's log-probabilities are those of the "
            "truncated distribution, the trainer's are not, and the importance weights would be biased; set it to 1 "
            "(evaluation and teachers have a top_p of their own)"
        )
    try:
        role_prompt(config, name)
    except UserError as error:
        yield str(error)
    if role.chat_template not in NO_TEMPLATE_FILE:
        if not Path(role.chat_template).is_file():
            yield f"{name}.chat_template: no file at {role.chat_template}; give one, or auto or none"
        elif (fault := _fault_of_template(Path(role.chat_template))) is not None:
            yield f"{name}.chat_template: {role.chat_template} is no Jinja template: {fault}"
    model, lengths = config.model_of(name), f"{name}.max_prompt_tokens + max_response_tokens = {role.longest}"
    if role.micro_batch_tokens < role.longest:
        yield f"{model}.micro_batch_tokens: {role.micro_batch_tokens} cannot hold one sequence of {lengths}"
    if config.launch.device == "cpu" and role.rollout.max_batched_tokens < role.longest:
        yield (
            f"{model}.rollout.max_batched_tokens: {role.rollout.max_batched_tokens} is below {lengths}; on a CPU a"
            " prompt is never cut in two"
        )
    try:
        dimensions = model_dimensions(role.model, config)
    except UserError:
        return  # said of the model
    limit = (dimensions or {}).get("max_position_embeddings")
    if limit is not None and role.longest > limit:
        yield f"{name}.max_response_tokens: {lengths} is over the model's {limit} positions"


def _fault_of_template(file: Path) -> str | None:
    """Return the fault of a chat template that cannot be parsed, and its line."""
    try:
        text = file.read_text(encoding="utf-8")
        # A tag of Hugging Face's own, which says what a model wrote.
        _TEMPLATES.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", text))
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    return None


def _optimizer_conflicts(key: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.schedule == "exponential" and optimizer.final_ratio == 0:
        yield f"{key}.final_ratio: an exponential decay never reaches 0; give a small number such as 1e-3"


def _engine_conflicts(name: str, role: RoleConfig, config: Config) -> Iterator[str]:
    """Yield settings that a role's engine cannot have."""
    key, rollout, world = f"{name}.rollout", role.rollout, config.world_size
    if world % rollout.tensor:
        yield f"{key}.tensor: {rollout.tensor} does not divide the {world} ranks (nodes * tasks_per_node)"
    elif rollout.tensor % (per_node := config.launch.tasks_per_node) and per_node % rollout.tensor:
        yield f"{key}.tensor: groups of {rollout.tensor} ranks do not fit evenly into nodes of {per_node}"
    if config.launch.device == "cpu" and rollout.kv_cache_gb is None:
        yield f"{key}.kv_cache_gb: required with launch.device cpu, e.g. 0.5"
    if rollout.max_num_seqs is not None and rollout.max_batched_tokens < rollout.max_num_seqs:
        yield (
            f"{key}.max_batched_tokens: {rollout.max_batched_tokens} is below {key}.max_num_seqs "
            f"{rollout.max_num_seqs}: an engine takes at least one token of each sequence at a time"
        )


def _model_conflicts(key: str, model: ModelConfig, role: RoleConfig, config: Config) -> Iterator[str]:
    """Yield settings of `role` that `model` cannot meet."""
    try:
        dimensions = model_dimensions(model, config)
        if dimensions is None:
            return
        shape = ModelShape.from_hf_config(dimensions)
    except UserError as error:
        yield f"{key}.path: {error}"
        return
    if model.build is not None and model.build.hidden_size % model.build.num_heads:
        yield f"{key}.build: hidden size {model.build.hidden_size} is not divisible by {model.build.num_heads} heads"
    difference = built_otherwise(model, config.seed)
    if difference is not None:
        yield (
            f"{key}.build: {difference}. Give what it was built with, remove that folder, or name another in {key}.path"
        )
    if config.launch.device == "cpu" and shape.head_dim not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"{key}: heads of {shape.head_dim} numbers; vLLM on a CPU has attention for {sizes}"
    try:
        check_parallel(shape, role.parallel.tensor, role.parallel.pipeline)
    except UserError as error:
        yield f"{key}: {error}"
    try:
        check_rollout_tensor(shape, role.rollout.tensor)
    except UserError as error:
        yield f"{key}: {error}"
