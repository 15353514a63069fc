"""Megatron-core on a CPU.

Megatron-core takes a GPU for granted: it asks for `device="cuda"`, for the current device and its random state,
and compares tensor type names with CUDA's. On a machine without a GPU, its modules get a `torch` of their own, a
thin stand-in in front of the real one whose "cuda" is the CPU. The real `torch` stays as it is, so vLLM in the same
process neither notices nor pays. What cannot be reached that way, two `Tensor` methods, is replaced only inside
`megatron_on_cpu()`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

# The modules on our path that mention CUDA.
_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.attention",
    "transformer.module",
    "utils",
)
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor", "zeros",
              "zeros_like")  # fmt: skip


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-core's own code inside this; does nothing where there is a GPU. May be nested."""
    if torch.cuda.is_available() or "type" in torch.Tensor.__dict__:
        yield
        return
    _install()
    real_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    try:
        yield
    finally:
        # Both are inherited from TensorBase; dropping ours uncovers them again.
        del torch.Tensor.type, torch.Tensor.cuda


@functools.cache
def _install() -> None:
    """Give Megatron-core's modules their own `torch`, once per process."""
    stand_in = _TorchOnCpu()
    for name in _MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        assert module.torch is torch, f"megatron.core.{name} was patched before"
        module.torch = stand_in
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


class _StandIn(types.ModuleType):
    """Answers what it overrides itself and leaves the rest to the real module."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _CudaOnCpu(_StandIn):
    """`torch.cuda` whose only device is the CPU."""

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def synchronize(*_args: Any, **_kwargs: Any) -> None:
        return None

    @staticmethod
    def empty_cache() -> None:
        return None

    @staticmethod
    def get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)


class _TorchOnCpu(_StandIn):
    """`torch` that makes on the CPU what is asked for on "cuda"."""

    def __init__(self) -> None:
        super().__init__(torch)
        self.__dict__["cuda"] = _CudaOnCpu()
        for name in _FACTORIES:
            self.__dict__[name] = _on_cpu(getattr(torch, name))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the factory with its `device="cuda"` taken to mean the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(device, str) and device.startswith("cuda"):
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make
