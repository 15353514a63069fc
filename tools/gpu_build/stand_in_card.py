"""A card that is not there: vLLM's CUDA platform, worker and memory pool, up to where a kernel would start.

`put_in()` makes vLLM take this machine for one with an H100. Everything above the kernels is then vLLM's own: engine
arguments and their checks, the external launcher's executor, scheduler and output, the worker's sleep and wake-up,
the pool's book-keeping, and the model classes of the CUDA platform with its own loader, whose tensors lie on the CPU.
What stands in: device moves, NCCL (Gloo does its work), the model's forward pass (`TOKEN` every time), and the mapping
of GPU memory, which is written down by tag.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

TOKEN, LOGPROB = 5, -0.5
CARD_BYTES = 80 * 2**30


def put_in() -> None:
    """Before anything of vLLM but `vllm.platforms` is imported."""
    if torch.version.cuda is None:
        # The CPU build has no CUDA kernels; the CUDA platform imports them first of all.
        for name in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C"):
            sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class StandInPlatform(cuda.NonNvmlCudaPlatform):
        """CUDA's, which knows its card without asking a driver."""

        dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return CARD_BYTES

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            super().check_and_update_config(vllm_config)
            # What the CUDA platform has chosen, with the stand-in's methods in front.
            vllm_config.parallel_config.worker_cls = stand_in_worker(vllm_config.parallel_config.worker_cls)
            vllm_config.load_config.device = "cpu"

    vllm.platforms.current_platform = StandInPlatform()
    if torch.version.cuda is None:
        vllm.platforms.vllm_version_matches_substr = lambda _: False  # "cpu", where Triton is not to be used
        torch.cuda.memory.get_allocator_backend = lambda: "none"
        torch.library.define("_C::silu_and_mul", "(Tensor! out, Tensor input) -> ()")
        from vllm import _custom_ops

        for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
            setattr(_custom_ops, f"cutlass_{name}", lambda *_: False)
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.max_memory_allocated = lambda *_: 0
    torch.accelerator.get_memory_info = lambda *_: (CARD_BYTES, CARD_BYTES)
    torch.cuda.mem_get_info = lambda *_: (CARD_BYTES, CARD_BYTES)
    torch.cuda.synchronize = lambda *_: None


class Pool:
    """The memory pool of vLLM's sleep mode: its own book-keeping, with the mapping of memory written down."""

    def __init__(self) -> None:
        from vllm.device_allocator import cumem

        data = cumem.AllocationData
        pool, sizes = self, iter(range(1, 1000))

        class StandInAllocator(cumem.CuMemAllocator):
            @contextlib.contextmanager
            def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
                size = next(sizes)
                self.pointer_to_data[size] = data((0, size, size, 0), str(tag))
                pool.tags.append(str(tag))
                yield

            def get_current_usage(self) -> int:
                return 0

        self.tags: list[str] = []
        self.allocator = StandInAllocator()
        cumem.CuMemAllocator.instance = self.allocator
        cumem.cumem_available, cumem.PIN_MEMORY = True, False
        cumem.unmap_and_release = cumem.create_and_map = lambda handle: None
        cumem.libcudart = types.SimpleNamespace(cudaMemcpy=lambda *_: None, cudaMemset=lambda *_: None)

    def mapped(self) -> set[str]:
        """Tags of what lies on the card."""
        return {entry.tag for entry in self.allocator.pointer_to_data.values() if not entry.is_asleep}

    def backed_up(self) -> set[str]:
        """Tags of what the host keeps a copy of."""
        entries = self.allocator.pointer_to_data.values()
        return {entry.tag for entry in entries if entry.cpu_backup_tensor is not None}


def stand_in_worker(worker_cls: str) -> str:
    """The name of a class made from vLLM's worker `worker_cls`."""
    module, _, name = worker_cls.rpartition(".")
    worker: Any = getattr(import_module(module), name)

    class StandInWorker(worker):
        """vLLM's worker; what it does on a card is left out."""

        def init_device(self) -> None:
            from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

            parallel = self.parallel_config
            self.device = torch.device("cpu")
            init_distributed_environment(
                parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, "gloo"
            )
            ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
            self.init_snapshot = types.SimpleNamespace(free_memory=CARD_BYTES)
            self.model_runner = stand_in_runner(self)

        def compile_or_warm_up_model(self) -> Any:
            from vllm.v1.worker.worker_base import CompilationTimes

            return CompilationTimes(0.0, 0.0)

        def execute_model(self, scheduler_output: Any) -> Any:
            return self.model_runner.execute_model(scheduler_output)

        def sample_tokens(self, grammar_output: Any) -> Any:
            return self.model_runner.sample_tokens(grammar_output)

        def synchronize_device(self) -> None: ...

    this: Any = sys.modules[__name__]
    this.StandInWorker = StandInWorker
    return f"{__name__}.StandInWorker"


def stand_in_runner(worker: Any) -> Any:
    """The model runner that vLLM would use, with its model and without its buffers."""
    if getattr(worker, "use_v2_model_runner", False):
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class StandInRunner(GPUModelRunner):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config
            for part in ("model", "cache", "load", "parallel", "scheduler", "lora", "compilation", "speculative"):
                setattr(self, f"{part}_config", getattr(vllm_config, f"{part}_config"))
            self.device, self.speculator = torch.device("cpu"), None
            self.is_encoder_only = False  # up to 0.28
            self.asked: list[Any] = []  # sampling parameters, request by request

        def load_model(self, *_: Any, **__: Any) -> None:
            from vllm.model_executor.model_loader import get_model

            self.model = get_model(vllm_config=self.vllm_config)

        def profile_run(self, *_: Any, **__: Any) -> None: ...

        def initialize_kv_cache(self, kv_cache_config: Any, *_: Any, **keywords: Any) -> None:
            self.kv_cache_config = kv_cache_config
            for context in keywords.values():
                with context:
                    pass

        def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        def shutdown(self) -> None: ...

        def post_kv_cache_wake_up(self) -> None: ...  # up to 0.28: of the buffers, which are left out

        def reset_lora_state(self) -> None: ...

        def reset_encoder_cache(self) -> None: ...

        def reset_mm_cache(self) -> None: ...

        def execute_model(self, scheduler_output: Any, *_: Any) -> Any:
            if not scheduler_output.total_num_scheduled_tokens:
                from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

                return EMPTY_MODEL_RUNNER_OUTPUT
            self.scheduled = list(scheduler_output.num_scheduled_tokens)
            self.asked += [request.sampling_params for request in scheduler_output.scheduled_new_reqs]
            return None

        def sample_tokens(self, grammar_output: Any) -> Any:
            import numpy as np
            from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

            names = self.scheduled
            rows = np.full((len(names), 1), TOKEN, dtype=np.int32)
            logprobs = LogprobsLists(rows, np.full(rows.shape, LOGPROB, np.float32), np.ones(len(names), np.int32))
            return ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[TOKEN] for _ in names],
                logprobs=logprobs,
            )

    return StandInRunner(worker.vllm_config)
