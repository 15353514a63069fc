"""A policy's memory, given up while an engine generates or the other role trains, and taken back for training."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tango_hpc.models.trainer import pinned_memory as host_memory
from tango_hpc.models.trainer.adapters import Adapters, is_adapter
from tango_hpc.models.trainer.model import PolicyModel, drop_buffers
from tango_hpc.models.trainer.optimizer import PolicyOptimizer


class DeviceMemory:
    """Moves whole storages, so that every view into them (buckets, shards, masters) stays valid.

    Weights and optimizer state go from a GPU to the host and stay where they live on the CPU anyway. Gradients are
    dropped on both: each update starts by zeroing them. Weights with adapters are dropped too, because they can be made
    again; the adapters go to the host.
    """

    def __init__(self, model: PolicyModel, optimizer: PolicyOptimizer | None, adapters: Adapters | None = None) -> None:
        self._model, self._optimizer, self._adapters = model, optimizer, adapters
        # By the storage's address in PyTorch, which lives as long as the tensors that share it.
        self._host: dict[int, Tensor] = {}
        self._away: dict[int, int] = {}

    def offload(self, keep_weights: bool = False, *, weights_changed: bool = True) -> None:
        """Drop the gradients, and free the GPU of everything that is on it, or of all but the weights.

        Weights that have not changed since they were brought back need no second copy to the host.
        """
        weights, state, gradients = self._storages()
        if weights:
            torch.cuda.synchronize()
        made_again = self._made_again()
        kept = {storage._cdata for storage in [*weights, *state]}
        unchanged = set() if weights_changed else {storage._cdata for storage in weights} & self._host.keys()
        leaving = [*([] if keep_weights else weights), *state, *gradients]
        leaving = [storage for storage in leaving if storage._cdata not in self._away]
        copied = [storage for storage in leaving if storage._cdata in kept - unchanged - made_again]
        if self._adapters is not None and any(storage._cdata in made_again for storage in leaving):
            self._adapters.forget()
        self._make_room([storage for storage in copied if storage._cdata not in self._host])
        for storage in copied:
            self._host[storage._cdata].copy_(_bytes_of(storage))
        for storage in leaving:
            self._away[storage._cdata] = storage.nbytes()
            storage.resize_(0)
        if weights:
            drop_buffers()
            torch.cuda.empty_cache()

    def onload(self, weights_only: bool = False) -> None:
        """Bring back what `offload` took away; `weights_only` is enough for log-probabilities and weight syncs."""
        weights, state, gradients = self._storages()
        for storage in weights if weights_only else [*weights, *state, *gradients]:
            key = storage._cdata
            if key in self._away:
                storage.resize_(self._away.pop(key))
                if key in self._host:
                    _bytes_of(storage).copy_(self._host[key], non_blocking=True)
        if weights:
            torch.cuda.synchronize()

    def where_it_is(self, tensor: Tensor) -> Tensor:
        """Return weights or optimizer state to read or fill: `tensor` itself, or the host's copy while it is away."""
        key = tensor.untyped_storage()._cdata
        if key not in self._away:
            return tensor
        copy = self._host[key].view(tensor.dtype)
        return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset() + tensor.storage_offset())

    def _make_room(self, storages: list[torch.UntypedStorage]) -> None:
        """Take host memory for storages that have none yet, in one piece."""
        if storages:
            places = host_memory.host_memory([storage.nbytes() for storage in storages])
            self._host |= zip((storage._cdata for storage in storages), places, strict=True)

    def _made_again(self) -> set[int]:
        """Return the storages of weights that adapters are added to."""
        if self._adapters is None:
            return set()
        return {
            parameter.untyped_storage()._cdata
            for name, parameter in self._model.named_parameters()
            if not is_adapter(name)
        }

    def _storages(self) -> tuple[list[torch.UntypedStorage], ...]:
        """Return storages that may leave, of (weights on a GPU, optimizer state on a GPU, gradients), each once."""
        parameters = list(self._model.parameters())
        state = self._optimizer.tensors() if self._optimizer is not None else []
        gradients = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
        seen: set[int] = set()
        found: tuple[list[torch.UntypedStorage], ...] = ([], [], [])
        for storages, tensors in zip(found, (parameters, state, gradients), strict=True):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                may_leave = storages is found[2] or host_memory.on_gpu(tensor)
                if may_leave and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    storages.append(storage)
        return found


def give_back_freed_memory(device: torch.device) -> None:
    """Leave what has been freed to other processes: allocators keep it for themselves unless told."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
