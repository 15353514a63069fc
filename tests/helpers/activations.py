"""What a trainer keeps for its backward pass, and what its update takes at most, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from tango_hpc.base.types import TrainSequence


def kept_bytes(policy: Any, num_tokens: int) -> int:
    """What autograd holds of one sequence of `num_tokens` fed tokens when the model has run, once per storage."""
    tensors = [*policy.model.parameters(), *(buffer.param_data for buffer in policy.optimizer.ddp.buffers)]
    weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved: list[torch.UntypedStorage] = []
    counted: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage())
        return tensor

    def count(*_: Any) -> None:
        sizes = {storage.data_ptr(): storage.nbytes() for storage in saved}  # 0 where it was forgotten
        counted.append(sum(size for place, size in sizes.items() if place not in weights))

    handle = policy.model.register_forward_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.update_sft([TrainSequence([1], [2] * num_tokens)])
    handle.remove()
    (found,) = counted
    return found


def peak_bytes(policy: Any, num_tokens: int) -> int:
    """The most that an update takes beside what was there before it, by PyTorch's allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        policy.update_sft([TrainSequence([1], [2] * num_tokens)])
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
