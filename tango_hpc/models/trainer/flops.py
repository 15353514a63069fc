"""The work of a step in floating-point operations, the peak of this machine, and its memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tango_hpc.base.model_shape import ModelShape

_REPEATS = 5


def update_operations(shape: ModelShape, lengths: Sequence[int], *, frozen: bool) -> float:
    """Return operations of forward and backward over sequences of these lengths: 6 per parameter and token, or 4 where
    the weights are `frozen` and get no gradients, and attention's.

    Causal attention multiplies half of each sequence's square. What is computed again to save memory does not count.
    """
    attention = 6.0 * shape.num_layers * shape.num_heads * shape.head_dim * sum(length**2 for length in lengths)
    return (4.0 if frozen else 6.0) * shape.num_parameters * sum(lengths) + attention


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return operations a second of a large matrix product on this rank, the best of several."""
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.ones((size, size), device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        left @ right
        _synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def total_peak(dtype: torch.dtype, device: torch.device, stated_tflops: float | None) -> float:
    """Return the peak of all ranks together, as stated for one or as measured on each. Collective."""
    if stated_tflops is not None:
        return stated_tflops * 1e12 * dist.get_world_size()
    total = torch.tensor(measured_peak(dtype, device), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory: on a GPU that of tensors since the last call, else the resident set's."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
