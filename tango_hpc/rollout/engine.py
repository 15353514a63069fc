"""A vLLM engine in this process: one shard of it per rank, no server, no Ray.

With a tensor size below the world size the remaining ranks are data parallel: rank r belongs to rollout group
r // tensor and holds shard r % tensor. vLLM keeps one set of process groups per process, so all engines of a run
share one tensor size.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from tango_hpc.config.values import MIN_TEMPERATURE
from tango_hpc.rollout.spread import spread_requests
from tango_hpc.types import Generation, GenerationRequest, SamplingSettings


class RolloutEngine:
    """Completes prompts given as token ids, the same on every rank: global requests in, global generations out.

    `load_weights=False` starts from arbitrary weights, for an engine that gets its weights by `WeightSync`.
    Creating an engine is collective and re-seeds torch's global generators (vLLM does so).
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        tensor: int,
        dtype: Literal["float32", "bfloat16"],
        max_model_len: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        device: Literal["cpu", "cuda"],
        load_weights: bool,
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.6,
        enforce_eager: bool = False,
        seed: int = 0,
    ) -> None:
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        if self.world_size % tensor:
            raise ValueError(f"a rollout tensor size of {tensor} does not divide the {self.world_size} ranks")
        self.tensor_size, self.tensor_rank = tensor, self.rank % tensor
        self.num_groups, self.group = self.world_size // tensor, self.rank // tensor
        self.model_dir, self.device = Path(model_dir), torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        arguments: dict[str, Any] = {}
        ident = _host_ident()
        # vLLM's tensor groups meet in sockets, which it would leave in the temporary folder for good.
        sockets = _set_up_vllm()
        sockets.mkdir(mode=0o700)
        if device == "cpu":
            if kv_cache_gb is None:
                raise ValueError("kv_cache_gb must be given on a CPU, e.g. 0.5")
            # vLLM compiles some helpers when it first samples: 13 s, and a C++ compiler, for nothing measurable here.
            torch._dynamo.config.disable = True
            from tango_hpc.rollout.cpu_worker import GROUP_IDENT

            os.environ[GROUP_IDENT] = ident
            arguments = {
                "worker_cls": "tango_hpc.rollout.cpu_worker.NamedCPUWorker",
                "enforce_eager": True,
                # A prompt cut in two would rewind its request's generator, which a CPU generator cannot.
                "enable_chunked_prefill": False,
            }
        else:
            arguments = {
                "enable_sleep_mode": True,
                "enforce_eager": enforce_eager,
                "gpu_memory_utilization": gpu_memory_utilization,
            }
        if kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * 2**30)
        from vllm import LLM

        # vLLM collects garbage six times per engine, half a second each over all that is imported. It freezes the
        # heap afterwards anyway.
        gc.freeze()
        self.llm = LLM(
            model=str(model_dir),
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format="auto" if load_weights else "dummy",
            use_tqdm_on_load=False,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=tensor,
            dtype=dtype,
            seed=seed,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            **arguments,
        )
        # All have connected to sockets and shared memory; without names, nothing is left behind by a rank that dies.
        dist.barrier()
        shutil.rmtree(sockets)
        for segment in Path("/dev/shm").glob(f"{ident}-*"):
            segment.unlink(missing_ok=True)
        # Set to run when the client is collected: it would end this process's default process group.
        self.llm.llm_engine.engine_core._finalizer.detach()
        if device == "cuda":
            from tango_hpc.rollout.gpu_memory import OwnMemoryBackend

            memory = OwnMemoryBackend()
            memory.claim()
            self._worker._sleep_mode_backend = memory

    @property
    def model(self) -> torch.nn.Module:
        """This rank's shard of vLLM's model."""
        return self._worker.model_runner.get_model()

    @property
    def _worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        """Complete every request, in their order. Collective, with the same arguments on every rank.

        Starts with an empty prefix cache: the result depends on the weights and the arguments alone, not on what
        was generated before, in this process or in the one that it resumes.
        """
        self.reset_prefix_cache()
        groups = spread_requests(requests, self.num_groups, sampling.max_tokens)
        mine = groups[self.group]
        generations = self._complete([requests[index] for index in mine], sampling) if mine else []
        if self.num_groups == 1:
            return generations
        packed: list[Any] = [None] * self.world_size
        dist.all_gather_object(packed, _pack(generations) if self.tensor_rank == 0 else None)
        result: dict[int, Generation] = {}
        for group, indices in enumerate(groups):
            result.update(zip(indices, _unpack(packed[group * self.tensor_size]), strict=True))
        return [result[index] for index in range(len(requests))]

    def _complete(self, requests: list[GenerationRequest], sampling: SamplingSettings) -> list[Generation]:
        from vllm import SamplingParams

        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature {sampling.temperature} is neither 0 (greedy) nor >= {MIN_TEMPERATURE}")
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # stop_token_ids alone decide
                seed=request.seed if sampling.temperature else None,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [_to_generation(output.outputs[0]) for output in outputs]

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; they belong to the weights that made them."""
        assert self.llm.reset_prefix_cache(), "the prefix cache is in use outside of generate()"

    def reload(self, weights: Path | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full Hugging Face tensors, from a folder or as they come, through vLLM's own loader."""
        if isinstance(weights, Path):
            self._worker.model_runner.reload_weights(weights_path=str(weights))
        else:
            self._worker.model_runner.reload_weights(weights_iterator=weights)
        head = self.model.lm_head
        if self.device.type == "cpu":
            # vLLM 0.32.0 leaves the packed copy of a tied output layer as it was.
            head.quant_method.process_weights_after_loading(head)
        self.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the GPU: weights go to host memory, the KV cache is dropped. On a CPU there is nothing to free."""
        if self.device.type == "cuda":
            self.llm.sleep(level=1)

    def wake(self, *, weights_only: bool = False) -> None:
        """Undo `sleep`. `weights_only`: not the KV cache, which a weight sync does not need."""
        if self.device.type == "cuda":
            self.llm.wake_up(["weights"] if weights_only else None)

    def close(self) -> None:
        """Give the engine's memory back; it cannot be used afterwards."""
        self.llm.llm_engine.model_executor.shutdown()
        del self.llm
        gc.unfreeze()
        gc.collect()


@functools.cache
def _set_up_vllm() -> Path:
    """The environment that vLLM reads, before it is first imported; the folder for its sockets. What a user has set stays."""
    sockets = Path(tempfile.gettempdir()) / f"tango-{uuid.uuid4().hex[:12]}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)
    return sockets


def _host_ident() -> str:
    """One name for all ranks of this job on this host; no other job has it."""
    token = [uuid.uuid4().hex[:12] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(token, src=0)
    return f"{token[0]}-{socket.gethostname()}"


def _to_generation(output: Any) -> Generation:
    token_ids = list(output.token_ids)
    logprobs = output.logprobs.logprobs if token_ids else []
    assert len(logprobs) == len(token_ids), f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens"
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    return Generation(token_ids, logprobs, output.finish_reason)


def _pack(generations: list[Generation]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Flat arrays, which pickle in no time: lengths, tokens, log-probabilities, whether stopped."""
    lengths = np.array([len(generation.token_ids) for generation in generations], dtype=np.int32)
    tokens = np.fromiter((token for g in generations for token in g.token_ids), np.int32, int(lengths.sum()))
    logprobs = np.fromiter((value for g in generations for value in g.logprobs), np.float64, int(lengths.sum()))
    stopped = np.array([generation.finish_reason == "stop" for generation in generations], dtype=bool)
    return lengths, tokens, logprobs, stopped


def _unpack(packed: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> list[Generation]:
    lengths, tokens, logprobs, stopped = packed
    ends = np.cumsum(lengths)
    return [
        Generation(tokens[end - n : end].tolist(), logprobs[end - n : end].tolist(), "stop" if stop else "length")
        for end, n, stop in zip(ends, lengths, stopped, strict=True)
    ]
