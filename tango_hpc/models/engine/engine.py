"""A vLLM engine in this process: one shard of it per rank, no server, no Ray.

With a tensor size below the world size the remaining ranks are data parallel: rank r belongs to rollout group
r // tensor and holds shard r % tensor. A process has one engine: vLLM's sleep mode, its process groups, its rotary
caches and its CUDA graphs are one per process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from tango_hpc.base.config.values import MIN_TEMPERATURE
from tango_hpc.base.errors import UserError
from tango_hpc.base.types import Generation, GenerationRequest, SamplingSettings
from tango_hpc.models.engine.counted import CountedResponses
from tango_hpc.models.engine.spread import spread_requests
from tango_hpc.models.parallel.ranks import sees_one_gpu
from tango_hpc.questions.protocol.tokenizer import load_tokenizer

# Where an engine that gets its weights by `WeightSync` loses them when it sleeps.
FORGETFUL_DEVICES: tuple[str, ...] = ("cuda",)

# The beginning of the name of a folder in the temporary one that lasts while an engine starts.
SOCKETS = "tango-rpc-"
# What Linux takes as the path of a socket, and what vLLM adds to the folder.
LONGEST_SOCKET_PATH, LONGEST_SOCKET_NAME = 107, 37


def take_stream() -> None:
    """Be on the CUDA stream that engines work on, which vLLM makes once in a process.

    A trainer that was built on another stream would add each gradient there, and hold its memory until both are done.
    """
    from vllm.utils.torch_utils import current_stream

    current_stream()


class RolloutEngine:
    """Completes prompts given as token ids, the same on every rank: global requests in, global generations out.

    `load_weights=False` starts from arbitrary weights, for an engine that gets its weights by `WeightSync`; on a GPU it
    forgets them whenever it sleeps. `gpu_share` of the GPU must be free when it starts, or vLLM refuses. Creating an
    engine is collective and re-seeds torch's global generators (vLLM does so).
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
        kv_cache_bytes: int,
        gpu_share: float = 0.5,
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
        self._awake: tuple[str, ...] = ("weights", "kv_cache")
        self.num_cached_tokens = 0  # of this shard's prompts in the last `generate`: computed once for several requests
        self.forgets_when_asleep = device in FORGETFUL_DEVICES and not load_weights
        ident = _host_ident()
        import_vllm(device)
        arguments = _device_arguments(device, ident, enforce_eager=enforce_eager, gpu_share=gpu_share)
        from vllm import LLM

        _check_build(device)
        # vLLM collects garbage six times per engine, half a second each over all that is imported.
        gc.freeze()
        # vLLM's tensor groups meet in sockets, which it would leave in the temporary folder for good.
        with socket_folder():
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
                kv_cache_memory_bytes=kv_cache_bytes,  # vLLM would measure a GPU that other processes use as well
                **arguments,
            )
            # All ranks have connected to sockets and shared memory, whose names are not needed any more.
            dist.barrier()
        for segment in Path("/dev/shm").glob(f"{ident}-*"):
            segment.unlink(missing_ok=True)
        _keep_process_group(self.llm)

    @property
    def model(self) -> torch.nn.Module:
        """This rank's shard of vLLM's model."""
        return self._worker.model_runner.get_model()

    @property
    def _worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model_dir)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingSettings,
        tell: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Complete every request, in their order. Collective, with the same arguments on every rank.

        `tell` gets the number of complete responses and of all, of this rank's share, whenever one is complete.

        Starts with an empty prefix cache: the result depends on the weights and the arguments alone, not on what
        was generated before, in this process or in the one that it resumes.
        """
        assert "kv_cache" in self._awake, "generate() while asleep"  # vLLM would do it, on memory that is not there
        self.reset_prefix_cache()
        groups = spread_requests(requests, self.num_groups, sampling.max_tokens)
        mine = groups[self.group]
        self.num_cached_tokens = 0
        generations = self._complete([requests[index] for index in mine], sampling, tell) if mine else []
        if self.num_groups == 1:
            return generations
        packed: list[Any] = [None] * self.world_size
        dist.all_gather_object(packed, _pack(generations) if self.tensor_rank == 0 else None)
        result: dict[int, Generation] = {}
        for group, indices in enumerate(groups):
            result.update(zip(indices, _unpack(packed[group * self.tensor_size]), strict=True))
        return [result[index] for index in range(len(requests))]

    def _complete(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingSettings,
        tell: Callable[[int, int], None] | None,
    ) -> list[Generation]:
        from vllm import SamplingParams

        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature {sampling.temperature} is neither 0 (greedy) nor >= {MIN_TEMPERATURE}")
        if (
            sampling.stop_strings
        ):  # found in the text, which vLLM's own choice of a tokenizer may put together otherwise
            self.llm.llm_engine.output_processor.tokenizer = self._tokenizer
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                stop=list(sampling.stop_strings),
                include_stop_str_in_output=True,
                ignore_eos=True,  # the two above alone decide
                seed=request.seed if sampling.temperature else None,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                detokenize=bool(sampling.stop_strings),
                skip_special_tokens=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        counted = functools.partial(CountedResponses, tell=tell) if tell is not None else False
        outputs = self.llm.generate(prompts, parameters, use_tqdm=counted)
        self.num_cached_tokens = sum(output.num_cached_tokens or 0 for output in outputs)
        return [_to_generation(output.outputs[0]) for output in outputs]

    def bare_generate(
        self, prompts: Sequence[list[int]], *, max_tokens: int, seeds: Sequence[int] | None = None
    ) -> int:
        """Have vLLM alone complete this rank's `prompts`, as a measure; return the tokens written, `max_tokens` each.

        With `seeds`, one for each prompt, it also gives log-probabilities, as `generate` has it do.
        """
        from vllm import SamplingParams

        self.reset_prefix_cache()
        asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        parameters: Any = SamplingParams(**asked)
        if seeds is not None:
            parameters = [SamplingParams(**asked, seed=seed, logprobs=0, flat_logprobs=True) for seed in seeds]
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

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
        """Free the GPU: the KV cache is dropped, weights are dropped or go to host memory. On a CPU it does nothing."""
        if self.device.type == "cuda":
            self.wake()  # up to vLLM 0.30 an engine that is half awake does not go to sleep
            self.llm.sleep(level=2 if self.forgets_when_asleep else 1)
            self._awake = ()

    def wake(self, *, weights_only: bool = False) -> None:
        """Undo `sleep`. `weights_only`: not the KV cache, which a weight sync does not need.

        What the engine forgets when asleep comes back as memory with anything in it.
        """
        if self.device.type == "cuda":
            parts = ("weights",) if weights_only else ("weights", "kv_cache")
            asleep = [part for part in parts if part not in self._awake]
            if asleep:
                self.llm.wake_up(asleep)
            self._awake = (*self._awake, *asleep)

    def close(self) -> None:
        """Give the engine's memory back; it cannot be used afterwards."""
        self.llm.llm_engine.model_executor.shutdown()
        del self.llm
        gc.unfreeze()
        gc.collect()


def _device_arguments(
    device: Literal["cpu", "cuda"], ident: str, *, enforce_eager: bool, gpu_share: float
) -> dict[str, Any]:
    """Return the arguments of `LLM` that a CPU or a GPU needs; `ident` names this rank's sockets on a CPU."""
    if device == "cuda":
        return {
            "enable_sleep_mode": True,
            # Logits of 16-bit weights in fp32, as the trainer has them on a GPU; on a CPU both round them.
            "hf_overrides": {"head_dtype": "float32"},
            "enforce_eager": enforce_eager,
            "gpu_memory_utilization": gpu_share,
            # Its handles to the memory of other GPUs need them all visible.
            "disable_custom_all_reduce": sees_one_gpu(torch.cuda.device_count()),
        }
    # vLLM compiles some helpers when it first samples: 13 s, and a C++ compiler, for nothing measurable here.
    torch._dynamo.config.disable = True
    from tango_hpc.models.engine.cpu_worker import GROUP_IDENT

    os.environ[GROUP_IDENT] = ident
    return {
        "worker_cls": "tango_hpc.models.engine.cpu_worker.NamedCPUWorker",
        "enforce_eager": True,
        # A prompt cut in two would rewind its request's generator, which a CPU generator cannot.
        "enable_chunked_prefill": False,
        # vLLM shares whole blocks of a prompt, and takes 128 tokens for one; no fewer than these can be had.
        "block_size": 32,
    }


def _check_build(device: Literal["cpu", "cuda"]) -> None:
    """Raise UserError where engines for CPUs are asked of vLLM's build for GPUs."""
    from vllm.platforms import current_platform

    if device == "cpu" and not current_platform.is_cpu():
        raise UserError(
            f"launch.device is cpu, but vLLM in {sys.prefix} is the build for GPUs, which has no engine for CPUs:"
            " run this in an environment of tools/install.sh, or set launch.device=cuda"
        )


def _keep_process_group(llm: Any) -> None:
    """Undo what vLLM since 0.31 does when its client is collected: end this process's default process group."""
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def import_vllm(device: Literal["cpu", "cuda"]) -> None:
    """Import vLLM with the variables that it reads; a user's stay. On GPUs its warnings, which name slow paths, are
    shown.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if device == "cuda" else "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM uses FlashInfer's sampler for no batch that asks for log-probabilities, as all of ours do.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    _find_cache()
    importlib.import_module("vllm.entrypoints.llm")


@functools.cache
def _socket_folder() -> Path:
    """Return where the sockets of this process's engine are; vLLM reads this once."""
    name = f"{SOCKETS}{uuid.uuid4().hex[:12]}"
    folder = Path(tempfile.gettempdir())
    if len(os.fsencode(folder / name)) + LONGEST_SOCKET_NAME > LONGEST_SOCKET_PATH:
        folder = Path("/tmp")  # what is made there is for us alone
    sockets = folder / name
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets)
    return sockets


@contextlib.contextmanager
def socket_folder() -> Iterator[None]:
    """Make and lock the folder of vLLM's sockets while an engine starts; remove those of killed processes."""
    sockets = _socket_folder()
    for left in sockets.parent.glob(SOCKETS + 12 * "[0-9a-f]"):
        with contextlib.suppress(OSError):  # another user's, or in use
            os.close(_locked(left))
            shutil.rmtree(left)
    made = sockets.with_name(f".{sockets.name}")  # no other process finds the folder before it is locked
    made.mkdir(mode=0o700)
    lock = _locked(made)
    made.rename(sockets)
    try:
        yield
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int:
    """Return an open file of `folder` that holds its lock, which ends with it. OSError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _find_cache() -> None:
    """Give vLLM another cache where it cannot write its own, as in a home directory that compute nodes only read.

    Without one, every engine starts a process that imports all of vLLM (10 CPU seconds) to look at its model's class;
    and on a GPU FlashInfer, which vLLM imports, cannot be imported at all, nor can Triton compile.
    """
    if "VLLM_CACHE_ROOT" in os.environ:
        return
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vllm"
    with contextlib.suppress(OSError):
        usual.mkdir(parents=True, exist_ok=True)
    if os.access(usual, os.W_OK):
        return
    own = Path(tempfile.gettempdir()) / f"vllm-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if own.stat().st_uid == os.getuid():  # another user could put anything there
        os.environ["VLLM_CACHE_ROOT"] = str(own)
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(own))
        os.environ.setdefault("TRITON_CACHE_DIR", str(own / "triton"))


def _host_ident() -> str:
    """Return one name for all ranks of this job on this host; no other job has it."""
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
    """Return flat arrays, which pickle in no time: lengths, tokens, log-probabilities, whether stopped."""
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
