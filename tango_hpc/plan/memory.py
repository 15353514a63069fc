"""Memory of every GPU, or of the machine, in every phase of training, and what to change where it does not fit.

One rank's worst case is added up from `sizes.py`: sequences as long as the configuration allows, the fullest
micro-batch, the pipeline stage that holds most. Phases: `rollout` and `verify` (an engine generates), `logprobs` (the
reference's), `train` (forward, backward, optimizer step), `reshard` (weights of trainer and engine together); on a node
`saving` too, which takes nothing of a GPU.
A rank has one process for each role, with its trainer and its engine. On a CPU they share one memory all the time. On
GPUs they take turns: what is not at work waits in host memory, except a trained role's engine weights, which its
trainer has; contexts, communicators and CUDA graphs of all stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.config.roles import RoleConfig
from tango_hpc.base.errors import UserError
from tango_hpc.models.engine.capacity import (
    GIB,
    MIB,
    Engine,
    cache_problem,
    engine_memory,
    most_sequences,
    resident_gpu_bytes,
    role_engine,
)
from tango_hpc.plan.batch import RoleBatch, largest, role_batch
from tango_hpc.plan.sizes import (
    BASE_BYTES,
    CPU_ENGINE_BYTES,
    CPU_HEAP_SLACK,
    CPU_PROCESS_BYTES,
    CPU_SHARED_BYTES,
    GPU_HEAP_SLACK,
    GPU_PROCESS_BYTES,
    SAVE_BYTES,
    Trainer,
    trainer_of,
)

Items = dict[str, int]  # bytes by what they are for

COPIES = "copies to save from"
# The share of a node's memory that the plan may fill with copies that no setting asks for.
ROOM = 0.8


@dataclass(frozen=True)
class Phase:
    """The memory of one place (a GPU, or a node) in one phase; `items` in bytes, of the worst rank or node."""

    name: str
    role: str
    items: Items

    @property
    def total(self) -> int:
        """Bytes together."""
        return sum(self.items.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on the GPU (empty on a CPU) and on a node's memory, against what there is (None: not known).

    `background_bytes`: memory from which on a node writes checkpoints while training goes on. `checkpoint_bytes`: what
    each trained role writes into one, all ranks together; `weights_bytes`: what of that are its weights.
    `upload_bytes`: what comes from the host to a GPU in a step that updates the role.
    """

    gpu: list[Phase]
    node: list[Phase]
    gpu_bytes: int | None
    node_bytes: int | None
    background_bytes: int
    checkpoint_bytes: dict[str, int]
    weights_bytes: dict[str, int]
    upload_bytes: dict[str, int]
    problems: list[str]


def plan_memory(
    config: Config,
    *,
    gpu_gb: float,
    node_gb: float | None,
    sync_bytes: Mapping[str, int],
    takes_checkpoints: bool = False,
) -> MemoryPlan:
    """Add everything up; `node_gb` None leaves the node's memory unchecked.

    `sync_bytes` are the buckets of each trained role's weight sync on one rank. `takes_checkpoints`: engines get the
    weights of checkpoints through trainers without optimizers. Raises UserError without a model's sizes.
    """
    roles = {name: _Role.of(config, name, sync_bytes.get(name, 0), takes_checkpoints) for name in config.models}
    on_cpu = config.launch.device == "cpu"
    gpu_bytes = None if on_cpu else int(gpu_gb * GIB)
    node_bytes = None if node_gb is None else int(node_gb * GIB)
    problems: list[str] = []
    gpu: list[Phase] = []
    if gpu_bytes is not None:
        for role in roles.values():
            gpu += _gpu_phases(config, role, gpu_bytes)
    node = _node_phases(config, roles, copies=bool(config.checkpoint.background))
    with_copies = max(phase.total for phase in _node_phases(config, roles, copies=True))
    saved = {name: _saved_bytes([role], range(config.world_size)) for name, role in roles.items() if role.stages}
    weights = {
        name: sum(
            stage.saved_weights(tensor_rank) for stage in roles[name].stages for tensor_rank in range(stage.tensor)
        )
        for name in saved
    }
    uploads = {} if on_cpu else {name: max(stage.uploads() for stage in roles[name].stages) for name in saved}
    plan = MemoryPlan(gpu, node, gpu_bytes, node_bytes, int(with_copies / ROOM), saved, weights, uploads, problems)
    caches = [cache_problem(config, name, gpu_bytes or 0) for name in roles]
    problems += [problem for problem in caches if problem is not None]
    problems += [_over("GPU", phase, gpu_bytes) for phase in gpu if gpu_bytes is not None and phase.total > gpu_bytes]
    too_large = [phase for phase in node if node_bytes is not None and phase.total > node_bytes]
    if too_large and node_bytes is not None:
        problems.append(_over("node", max(too_large, key=lambda phase: phase.total), node_bytes))
    return plan


def gpu_phases(config: Config, role: str, gpu_gb: float) -> list[Phase]:
    """Return the phases of one role's model on the GPU that holds most in each, but for those of checkpoints."""
    bucket = int(2 * config.reshard.bucket_mb * MIB)
    return _gpu_phases(config, _Role.of(config, role, bucket, False), int(gpu_gb * GIB))


def saves_in_background(config: Config, node_gb: float) -> bool:
    """`checkpoint.background`; where that is null, whether a node of `node_gb` GiB has room for all and for the copies.

    False for models whose sizes are not known.
    """
    if config.checkpoint.background is not None:
        return config.checkpoint.background
    buckets = dict.fromkeys(config.models, int(2 * config.reshard.bucket_mb * MIB))
    try:
        plan = plan_memory(config, gpu_gb=0, node_gb=None, sync_bytes=buckets)
    except UserError:
        return False
    return plan.background_bytes <= node_gb * GIB


def copied_in_fine_tuning(config: Config) -> int:
    """Return bytes of the copies on the fullest node while the checkpoint of a role that is fine-tuned is written from
    them.

    Raises UserError where a model's sizes are not known.
    """
    no_reference = config.algorithm.model_copy(update={"kl_coef": 0.0})
    learns = {"trainable": True}
    generator, verifier = config.generator.model_copy(update=learns), config.verifier
    if verifier is not None:
        verifier = verifier.model_copy(update=learns)
    config = config.model_copy(update={"algorithm": no_reference, "generator": generator, "verifier": verifier})
    roles = [_Role.of(config, name, 0, False) for name in config.sft.models]
    return max((_saved_bytes([role], ranks) for role in roles for ranks in _ranks_by_node(config)), default=0)


@dataclass(frozen=True)
class _Role:
    """A model's trainer (by pipeline stage; none where it is not trained), engine and batch, by its first role.

    `visiting`: the weights of one that only brings those of checkpoints to the engine, on the fullest stage.
    """

    name: str
    settings: RoleConfig
    stages: list[Trainer]
    engine: Engine
    batch: RoleBatch
    sync_bytes: int  # buckets of a weight sync on the rank that needs most
    visiting: int

    @classmethod
    def of(cls, config: Config, name: str, sync_bytes: int, takes_checkpoints: bool) -> _Role:
        settings = config.models[name]
        trainers = [trainer_of(config, name, stage) for stage in range(settings.parallel.pipeline)]
        visiting = max(trainer.sizes.weights for trainer in trainers) if takes_checkpoints else 0
        if visiting:
            sync_bytes = int(2 * config.reshard.bucket_mb * MIB)
        trainers = trainers if settings.trainable else []
        engine, batch = role_engine(config, name), largest([role_batch(config, role) for role in config.roles_of(name)])
        return cls(name, settings, trainers, engine, batch, sync_bytes, visiting)

    def in_flight(self, stage: int) -> int:
        """Return micro-batches whose activations a pipeline stage keeps at once (1F1B)."""
        return min(len(self.stages) - stage, self.batch.micro_batches)

    def update_workspace(self, stage: int) -> int:
        return self.stages[stage].update_workspace(self.batch.micro_batch_tokens, self.in_flight(stage))

    def stage_of(self, rank: int) -> Trainer:
        """Return the trainer of a rank: tensor ranks count fastest, then data, then pipeline."""
        first = self.stages[0]
        return self.stages[rank // (first.tensor * first.data)]


# -- GPUs -------------------------------------------------------------------------------------------------------


def _gpu_phases(config: Config, role: _Role, gpu_bytes: int) -> list[Phase]:
    """Return the phases of one role on the GPU that holds most in each."""
    base = {"CUDA contexts, NCCL, graphs": resident_gpu_bytes(config)}
    memory = engine_memory(config, role.name, gpu_bytes)
    awake = {"engine weights": memory.weights, "sampler tables": memory.tables}
    generating = awake | {"KV cache": max(memory.cache, 0), "engine activations": memory.activations}
    phases = [Phase("rollout" if role.name == "generator" else "verify", role.name, base | generating)]
    if role.visiting:
        both = {"weights": role.visiting, **awake, "buckets": role.sync_bytes}
        phases.append(Phase("reshard", role.name, base | both))
    if not role.stages:
        return phases
    tokens = role.batch.micro_batch_tokens
    candidates: dict[str, list[Items]] = {name: [] for name in ("logprobs", "train", "reshard")}
    for stage, trainer in enumerate(role.stages):
        sizes = trainer.sizes
        resident = base | {"weights": sizes.weights, "gradients": sizes.gradients, "optimizer": sizes.optimizer}
        if sizes.reference:
            forward = int(trainer.logprob_workspace(tokens) * (1 + GPU_HEAP_SLACK))
            candidates["logprobs"].append(resident | {"reference": sizes.reference_pass, "activations": forward})
        update = int(role.update_workspace(stage) * (1 + GPU_HEAP_SLACK))
        candidates["train"].append(resident | {"activations, logits": update})
        candidates["reshard"].append(base | {"weights": sizes.weights, **awake, "buckets": role.sync_bytes})
    for name, options in candidates.items():
        if options:
            phases.append(Phase(name, role.name, max(options, key=lambda items: sum(items.values()))))
    return phases


# -- host memory ------------------------------------------------------------------------------------------------


def _node_phases(config: Config, roles: Mapping[str, _Role], *, copies: bool) -> list[Phase]:
    """Return the phases of the node that holds most; with GPUs, one phase for all but saving.

    `copies`: a checkpoint may be written from copies throughout.
    """
    nodes = _ranks_by_node(config)
    on_cpu = config.launch.device == "cpu"
    # Under Slurm every rank is a task, which imports by itself.
    num_tasks = 1 if config.launch.nodes == 1 else config.launch.tasks_per_node
    shared = {"imported packages": num_tasks * CPU_SHARED_BYTES} if on_cpu else {}
    mapped = _mapped_bytes(config)
    files = {"model files, mapped": mapped} if mapped else {}
    resident = [_sum([shared, files, *(_rank_resident(config, roles, rank) for rank in ranks)]) for ranks in nodes]
    if copies:
        resident = [
            items | {COPIES: _saved_bytes(roles.values(), ranks)} for items, ranks in zip(resident, nodes, strict=True)
        ]
    fullest = max(range(len(nodes)), key=lambda node: sum(resident[node].values()))
    base, ranks = resident[fullest], nodes[fullest]
    throughout = "training" if any(role.stages for role in roles.values()) else "generating"
    phases = [] if on_cpu else [Phase(throughout, "both" if len(roles) > 1 else next(iter(roles)), base)]
    for role in roles.values():
        name = "rollout" if role.name == "generator" else "verify"
        if on_cpu:
            rollout = role.settings.rollout
            tokens = min(rollout.max_batched_tokens, role.batch.rollout_tokens_per_engine)
            num_seqs = engine_memory(config, role.name, 0).num_seqs
            extra = role.engine.workspace(tokens, min(num_seqs, role.batch.rollouts_per_engine))
            phases.append(Phase(name, role.name, base | {"engine activations": len(ranks) * extra}))
            if role.visiting:
                phases.append(Phase("reshard", role.name, base | {"buckets": len(ranks) * role.sync_bytes}))
        if not role.stages:
            continue
        trainers = [role.stage_of(rank) for rank in ranks]
        if on_cpu:
            slack, tokens = 1 + CPU_HEAP_SLACK, role.batch.micro_batch_tokens
            if trainers[0].with_reference:
                forward = sum(int(trainer.logprob_workspace(tokens) * slack) for trainer in trainers)
                phases.append(Phase("logprobs", role.name, base | {"activations": forward}))
            update = sum(int(role.update_workspace(trainer.stage) * slack) for trainer in trainers)
            gradients = sum(trainer.sizes.gradients for trainer in trainers)
            phases.append(Phase("train", role.name, base | {"gradients": gradients, "activations, logits": update}))
            phases.append(Phase("reshard", role.name, base | {"buckets": len(ranks) * role.sync_bytes}))
        phases.append(Phase("saving", role.name, base | {"a piece of the checkpoint": len(ranks) * SAVE_BYTES}))
    return phases


def _ranks_by_node(config: Config) -> list[range]:
    per_node = config.launch.tasks_per_node
    return [range(node * per_node, (node + 1) * per_node) for node in range(config.launch.nodes)]


def _saved_bytes(roles: Iterable[_Role], ranks: Sequence[int]) -> int:
    """Return what these ranks write into a checkpoint: their shares of the optimizer, of weights and of the
    reference.
    """
    total = 0
    for role in roles:
        for rank in ranks if role.stages else ():
            trainer = role.stage_of(rank)
            total += trainer.saved(rank % trainer.tensor)
    return total


def _mapped_bytes(config: Config) -> int:
    """Return bytes of the models that adapters are added to: one copy a node, which all its processes read."""
    adapted = {role.model.path: name for name, role in config.models.items() if role.trainable and role.adapter}
    return sum(role_shape(config, name).num_parameters * BASE_BYTES for name in adapted.values())


def _rank_resident(config: Config, roles: Mapping[str, _Role], rank: int) -> Items:
    """Return the bytes that one rank keeps in host memory at all times."""
    on_cpu = config.launch.device == "cpu"
    process = CPU_PROCESS_BYTES + CPU_ENGINE_BYTES if on_cpu else GPU_PROCESS_BYTES
    items = [{"processes": len(roles) * process}]
    for role in roles.values():
        kept = {}
        if on_cpu:
            kept["engine weights"] = role.engine.weights
        elif not role.stages:  # on GPUs a trained role's engine wakes empty, and gets its weights by a sync
            kept["engine weights"] = role.engine.backup_bytes(most_sequences(config, role.name))
        if on_cpu:
            kept["KV cache"] = engine_memory(config, role.name, 0).cache
        if role.visiting:
            kept["weights"] = role.visiting
        if role.stages:
            sizes = role.stage_of(rank).sizes
            kept |= {"weights": sizes.kept, "optimizer": sizes.optimizer, "reference": sizes.reference}
        items.append({f"{role.name}: {name}": value for name, value in kept.items() if value})
    return _sum(items)


def _sum(parts: object) -> Items:
    total: Items = {}
    for items in parts:  # type: ignore[attr-defined]
        for name, value in items.items():
            total[name] = total.get(name, 0) + value
    return total


# -- what does not fit ------------------------------------------------------------------------------------------

ADVICE = {
    "rollout": (
        "lower {role}.rollout.gpu_memory_utilization or {role}.rollout.kv_cache_gb, or raise {role}.rollout.tensor"
    ),
    "logprobs": "raise {role}.parallel.tensor or pipeline, or lower {role}.micro_batch_tokens",
    "train": (
        "raise {role}.parallel.tensor or pipeline, lower {role}.micro_batch_tokens, set "
        "{role}.recompute=selective or full, or take more ranks (the optimizer is spread over data-parallel ones)"
    ),
    "reshard": "raise {role}.parallel.tensor or {role}.rollout.tensor, or lower reshard.bucket_mb",
}
NODE_ADVICE = (
    "a larger {role}.parallel.tensor (fewer copies of weights and reference), a smaller model, {role}.trainable=false, "
    "algorithm.kl_coef=0 (drops the reference), fewer ranks a node, on a CPU a smaller {role}.rollout.kv_cache_gb, or "
    "nodes with more memory"
)


def _over(place: str, phase: Phase, limit: int) -> str:
    largest = sorted(phase.items.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in largest)
    role = "generator" if phase.role == "both" else phase.role
    key = "rollout" if phase.name == "verify" else phase.name
    advice = (NODE_ADVICE if place == "node" else ADVICE[key]).format(role=role)
    return (
        f"{phase.role}, {phase.name}: needs {phase.total / GIB:.1f} GiB of a {place}'s {limit / GIB:.1f} GiB "
        f"(largest parts, GiB: {parts}): {advice}"
    )
