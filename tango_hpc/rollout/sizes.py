"""How much a role's engine takes of a rank, for the engine itself and for `tango plan`. No torch.

A rank's GPU serves one process per role, in turns: who has worked leaves only its CUDA context, its communicators and
its engine's CUDA graphs there. What an engine may take for its KV cache is therefore worked out, not measured on a GPU
that another process is using.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tango_hpc.config import Config
from tango_hpc.config.models import role_shape
from tango_hpc.model.engine_layout import engine_layout
from tango_hpc.model.shape import ELEMENT_BYTES, ModelShape, padded_vocab_size

MIB = 2**20
GIB = 2**30
# What a role's process keeps on its GPU, at work or not; an estimate until it is measured on one. Of the first: a CUDA
# context with the kernels of torch and vLLM that are loaded into it, 0.5 to 1 GiB; NCCL's communicators of Megatron-core's
# groups and of vLLM's (plan/communicators.py), with a few hundred MiB of buffers each, 2 GiB; cuBLAS's workspaces and the
# halves of segments that the caching allocator cannot give back, 0.5 GiB. The second: CUDA graphs of its engine.
GPU_CONTEXT_BYTES = int(3.5 * GIB)
GPU_GRAPH_BYTES = int(0.7 * GIB)
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

    @cached_property
    def backup_bytes(self) -> int:
        """Host memory that the weights take while an engine on a GPU sleeps at vLLM's level 1: an upper bound.

        vLLM backs up each segment of the caching allocator in pinned memory, which PyTorch rounds up to a power of two.
        """
        sizes = [
            math.prod(param.shape) * self.element_bytes for param in engine_layout(self.shape, self.tensor, 0).values()
        ]
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
        """Activations of the largest batch, and logits with the copies that log-probabilities need."""
        inner = self.shape.intermediate_size // self.tensor
        layer = (3 * inner + 6 * self.shape.hidden_size) * self.element_bytes * max_batched_tokens
        logits = 3 * 4 * self.shape.vocab_size * max_num_seqs
        return layer + logits


def _power_of_two(size: int) -> int:
    """The smallest power of two that is `size` or more."""
    return 1 << (size - 1).bit_length()


def role_engine(config: Config, role_name: str) -> Engine:
    """A role's engine on one rank. Raises `UserError` for a model without sizes."""
    return Engine(
        shape=role_shape(config, role_name),
        tensor=config.roles[role_name].rollout.tensor,
        element_bytes=ELEMENT_BYTES[config.launch.dtype],
        on_cpu=config.launch.device == "cpu",
    )


def resident_gpu_bytes(config: Config) -> int:
    """What all roles' processes together keep on a GPU, whoever works."""
    graphs = sum(0 if role.rollout.enforce_eager else GPU_GRAPH_BYTES for role in config.roles.values())
    return len(config.roles) * GPU_CONTEXT_BYTES + graphs


def cache_bytes(config: Config, role_name: str, gpu_bytes: int) -> int:
    """The KV cache of a role's engine on one rank, whose GPU has `gpu_bytes` (of no account on a CPU).

    `rollout.kv_cache_gb` where it is set; else what the engine's share of the GPU has left beside what stays there, its
    weights and its activations: 0 or less if nothing is left (`cache_problem` says what to do).
    """
    rollout = config.roles[role_name].rollout
    if rollout.kv_cache_gb is not None:
        return int(rollout.kv_cache_gb * GIB)
    engine = role_engine(config, role_name)
    workspace = engine.workspace(rollout.max_batched_tokens, rollout.max_num_seqs)
    return int(rollout.gpu_memory_utilization * gpu_bytes) - resident_gpu_bytes(config) - engine.weights - workspace


def engine_bytes(config: Config, role_name: str, gpu_bytes: int) -> int:
    """What a role's engine takes on one rank when it is awake: weights, activations, KV cache."""
    engine, rollout = role_engine(config, role_name), config.roles[role_name].rollout
    workspace = engine.workspace(rollout.max_batched_tokens, rollout.max_num_seqs)
    return engine.weights + workspace + cache_bytes(config, role_name, gpu_bytes)


def cache_problem(config: Config, role_name: str, gpu_bytes: int) -> str | None:
    """Why an engine cannot work with such a cache, and what to change; None if it can."""
    role, engine = config.roles[role_name], role_engine(config, role_name)
    key, rollout = f"{role_name}.rollout", role.rollout
    cache = cache_bytes(config, role_name, gpu_bytes)
    if cache <= 0:
        workspace = engine.workspace(rollout.max_batched_tokens, rollout.max_num_seqs)
        return (
            f"{role_name}, rollout: {key}.gpu_memory_utilization {rollout.gpu_memory_utilization} leaves nothing for the "
            f"KV cache after {engine.weights / GIB:.1f} GiB of weights, {workspace / GIB:.1f} GiB of activations and "
            f"{resident_gpu_bytes(config) / GIB:.1f} GiB that processes keep on the GPU: raise it or {key}.tensor, or "
            f"lower {key}.max_batched_tokens or {key}.max_num_seqs"
        )
    taken = engine_bytes(config, role_name, gpu_bytes) + resident_gpu_bytes(config)
    if config.launch.device == "cuda" and taken > gpu_bytes:
        return (
            f"{role_name}, rollout: {taken / GIB:.1f} GiB of a GPU's {gpu_bytes / GIB:.1f} GiB for weights, activations, a "
            f"KV cache of {cache / GIB:.1f} GiB and what processes keep there: lower {key}.kv_cache_gb"
        )
    length = role.max_prompt_tokens + role.max_response_tokens
    needed = length * engine.cache_bytes_per_token  # vLLM refuses less than one sequence of the allowed length
    if cache < needed:
        return (
            f"{role_name}, rollout: a KV cache of {cache / GIB:.2f} GiB cannot hold one sequence of {length} tokens "
            f"({needed / GIB:.2f} GiB): raise {key}.kv_cache_gb or {key}.tensor, or allow fewer tokens"
        )
    return None
