"""The capacity of a role's engine on a rank: memory and sequences, for the engine and for `tango plan`. No torch.

A rank's GPU serves one process per role, in turns: a process that has had its turn leaves only its CUDA context, its
communicators and its engine's CUDA graphs there. The memory of an engine's KV cache is therefore computed, not measured
on a GPU that another process is using. `engine_memory` alone computes it, and resolves the engine's settings that are
null.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.config.roles import RolloutConfig
from tango_hpc.base.model_shape import ELEMENT_BYTES, ModelShape, padded_vocab_size
from tango_hpc.models.layout.engine_layout import engine_layout

MIB = 2**20
GIB = 2**30
# What a role's process keeps on its GPU, at work or not; an estimate until it is measured on one. Of the first: a CUDA
# context with the kernels of torch and vLLM that are loaded into it, 0.5 to 1 GiB; NCCL's communicators of
# Megatron-core's
# groups and of vLLM's (plan/communicators.py), with a few hundred MiB of buffers each, 2 GiB; cuBLAS's workspaces and
# the
# halves of segments that the caching allocator cannot give back, 0.5 GiB. The second: CUDA graphs of its engine.
GPU_CONTEXT_BYTES = int(3.5 * GIB)
GPU_GRAPH_BYTES = int(0.7 * GIB)
# Share of a GPU that an engine fills where `rollout.gpu_memory_utilization` is null: the rest is for what is above only
# an estimate, and for what the allocator cannot use.
MOST_OF_A_GPU = 0.88
# Sequences in the largest CUDA graph that vLLM captures by default (1,024 on GB200, 512 on all others).
LARGEST_GRAPH = 512
# How PyTorch's caching allocator takes memory of a GPU: what is asked for up to the first size shares segments of the
# second; what is above all of them gets a segment of its own, rounded up to whole multiples of the last.
SHARED_SEGMENTS = ((1 * MIB, 2 * MIB), (10 * MIB, 20 * MIB))
SEGMENT_UNIT = 2 * MIB


@dataclass(frozen=True)
class Engine:
    """A role's vLLM engine on one rank."""

    shape: ModelShape
    tensor: int
    element_bytes: int
    on_cpu: bool

    @cached_property
    def weights(self) -> int:
        """Bytes of weights. On a CPU the kernels keep packed copies of the embedding and of a tied output layer."""
        count = sum(math.prod(param.shape) for param in engine_layout(self.shape, self.tensor, 0).values())
        if self.on_cpu:
            rows = padded_vocab_size(self.shape.vocab_size, self.tensor) // self.tensor
            count += 2 * rows * self.shape.hidden_size
        return count * self.element_bytes

    def sampler_tables(self, max_num_seqs: int) -> list[int]:
        """Return bytes of the tables that vLLM's V2 model runner keeps on a GPU for each sequence and each entry of the
        vocabulary.

        Counts of tokens (int32), and two masks of a bit: of the prompt's tokens, and of those that a grammar allows.
        vLLM makes them while it loads the weights, so they sleep and wake with the weights.
        """
        mask = 4 * -(-self.shape.vocab_size // 32)
        return [] if self.on_cpu else [size * max_num_seqs for size in (4 * self.shape.vocab_size, mask, mask)]

    def backup_bytes(self, max_num_seqs: int) -> int:
        """Return host memory that the weights take while an engine on a GPU sleeps at vLLM's level 1: an upper bound.

        vLLM backs up each segment of the caching allocator in pinned memory, which PyTorch rounds up to a power of two.
        The sampler's tables are among the segments.
        """
        layout = engine_layout(self.shape, self.tensor, 0).values()
        sizes = [math.prod(param.shape) * self.element_bytes for param in layout] + self.sampler_tables(max_num_seqs)
        total, floor = 0, 0
        for largest, segment in SHARED_SEGMENTS:  # all but the last are more than half full, or the next would fit
            shared = sum(size for size in sizes if floor < size <= largest)
            total += -(-2 * shared // segment) * _power_of_two(segment)
            floor = largest
        return total + sum(_power_of_two(-(-size // SEGMENT_UNIT) * SEGMENT_UNIT) for size in sizes if size > floor)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        heads = max(self.shape.num_kv_heads // self.tensor, 1)
        return 2 * self.shape.num_layers * heads * self.shape.head_dim * self.element_bytes

    def workspace(self, max_batched_tokens: int, max_num_seqs: int) -> int:
        """Return activations of the largest batch, and logits with the copies that log-probabilities need."""
        inner = self.shape.intermediate_size // self.tensor
        layer = (3 * inner + 6 * self.shape.hidden_size) * self.element_bytes * max_batched_tokens
        logits = 3 * 4 * self.shape.vocab_size * max_num_seqs
        return layer + logits


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is `size` or more."""
    return 1 << (size - 1).bit_length()


def role_engine(config: Config, role_name: str) -> Engine:
    """Return a role's engine on one rank. Raises `UserError` for a model without sizes."""
    return Engine(
        shape=role_shape(config, role_name),
        tensor=config.roles[role_name].rollout.tensor,
        element_bytes=ELEMENT_BYTES[config.launch.dtype],
        on_cpu=config.launch.device == "cpu",
    )


def resident_gpu_bytes(config: Config) -> int:
    """Return the bytes that the processes of all roles keep on a GPU at all times."""
    graphs = sum(0 if role.rollout.enforce_eager else GPU_GRAPH_BYTES for role in config.models.values())
    return len(config.models) * GPU_CONTEXT_BYTES + graphs


@dataclass(frozen=True)
class EngineMemory:
    """The memory and the sequences of a role's engine on one rank, with null settings resolved; memory in bytes."""

    num_seqs: int  # that it takes at once
    weights: int
    tables: int  # of the sampler
    activations: int
    cache: int  # 0 or less where nothing is left for it (`cache_problem` says what to do)

    @property
    def total(self) -> int:
        """The bytes of the engine when it is awake."""
        return self.weights + self.tables + self.activations + self.cache


def engine_memory(config: Config, role_name: str, gpu_bytes: int) -> EngineMemory:
    """Return the settings of a role's engine on a rank whose GPU has `gpu_bytes` (of no account on a CPU).

    The cache is `rollout.kv_cache_gb` where that is set; else what the engine's share of the GPU has left beside what
    stays there, its weights, its tables and its activations. The engine takes as many sequences at once as
    `most_sequences` says, as far as its cache holds them, each counted as half as long as allowed: few are longer, and
    vLLM computes again what finds no room.
    """
    role, engine = config.models[config.model_of(role_name)], role_engine(config, role_name)
    rollout = role.rollout
    room = int(_share(rollout) * gpu_bytes) - resident_gpu_bytes(config) - engine.weights

    def with_sequences(count: int) -> EngineMemory:
        tables, activations = sum(engine.sampler_tables(count)), engine.workspace(rollout.max_batched_tokens, count)
        cache = room - tables - activations if rollout.kv_cache_gb is None else int(rollout.kv_cache_gb * GIB)
        return EngineMemory(count, engine.weights, tables, activations, cache)

    if rollout.max_num_seqs is not None:
        return with_sequences(rollout.max_num_seqs)
    sequence = role.longest / 2 * engine.cache_bytes_per_token
    choices = map(with_sequences, range(most_sequences(config, role_name), 0, -1))
    return next((memory for memory in choices if memory.cache >= memory.num_seqs * sequence), with_sequences(1))


def _share(rollout: RolloutConfig) -> float:
    """Return share of the GPU in use while an engine generates, with what all roles' processes keep there."""
    return MOST_OF_A_GPU if rollout.gpu_memory_utilization is None else rollout.gpu_memory_utilization


def most_sequences(config: Config, role_name: str) -> int:
    """Return `rollout.max_num_seqs`; where that is null, as many as the engine's cache holds.

    An engine's share of the responses of a step or of an evaluation in the loop, up to vLLM's largest CUDA graph and
    `rollout.max_batched_tokens`. Where no role is trained the questions are in files, and their number is not asked.
    """
    rollout = config.roles[role_name].rollout
    if rollout.max_num_seqs is not None:
        return rollout.max_num_seqs
    most = min(LARGEST_GRAPH, rollout.max_batched_tokens)
    if not any(role.trainable for role in config.roles.values()):
        return most
    roles = config.roles_of(config.model_of(role_name))
    return min(most, max(count for role in roles for count in responses_per_engine(config, role)))


def responses_per_engine(config: Config, role_name: str) -> tuple[int, int]:
    """Return responses that one engine of a role is asked for at once: in a step's largest phase (a first draw), in an
    evaluation.
    """
    train = config.train
    asked = train.questions_per_step * train.rollouts_per_question
    if role_name == "verifier":
        more = max(train.rollouts_per_question - train.verifications_per_solution, 0) if train.joint else 0
        asked = max(asked * train.verifications_per_solution, train.num_joint_solutions * more)
    groups = config.world_size // config.roles[role_name].rollout.tensor
    return math.ceil(asked / groups), math.ceil(config.data.eval_questions / groups)


def cache_problem(config: Config, role_name: str, gpu_bytes: int) -> str | None:
    """Return why an engine cannot work with such a cache, and what to change; None if it can."""
    role, engine = config.models[config.model_of(role_name)], role_engine(config, role_name)
    key, memory = f"{role_name}.rollout", engine_memory(config, role_name, gpu_bytes)
    if memory.cache <= 0:
        return (
            f"{role_name}, rollout: {key}.gpu_memory_utilization {_share(role.rollout)} leaves nothing for the KV cache"
            f" after {memory.weights / GIB:.1f} GiB of weights, {(memory.tables + memory.activations) / GIB:.1f} GiB of"
            f" activations and tables and {resident_gpu_bytes(config) / GIB:.1f} GiB that processes keep on the GPU:"
            f" raise it or {key}.tensor, or lower {key}.max_batched_tokens or {key}.max_num_seqs"
        )
    taken = memory.total + resident_gpu_bytes(config)
    if config.launch.device == "cuda" and taken > gpu_bytes:
        return (
            f"{role_name}, rollout: {taken / GIB:.1f} GiB of a GPU's {gpu_bytes / GIB:.1f} GiB for weights,"
            f" activations, a KV cache of {memory.cache / GIB:.1f} GiB and what processes keep there: lower"
            f" {key}.kv_cache_gb"
        )
    length = role.longest
    needed = length * engine.cache_bytes_per_token  # vLLM refuses less than one sequence of the allowed length
    if memory.cache < needed:
        return (
            f"{role_name}, rollout: a KV cache of {memory.cache / GIB:.2f} GiB cannot hold one sequence of {length}"
            f" tokens ({needed / GIB:.2f} GiB): raise {key}.kv_cache_gb or {key}.tensor, or allow fewer tokens"
        )
    return None
