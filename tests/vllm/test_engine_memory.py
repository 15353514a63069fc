"""The sizes that `models/engine/capacity.py` counts are vLLM's own, and every rank of a role starts the engine that the
plan says.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tango_hpc.base.config import Config
from tango_hpc.base.model_shape import ModelShape
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.models.engine.capacity import GIB, LARGEST_GRAPH, Engine, engine_memory
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import prepare_small_run

SHAPE = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
NULLS = ("generator.rollout.max_num_seqs=null", "verifier.rollout.max_num_seqs=null")
SIZES = {0: 70 * GIB, 1: 80 * GIB}  # of the GPU of each rank


def largest_graphs() -> list[int]:
    """The largest CUDA graph that vLLM's own defaults capture for engines of different sizes."""
    from tango_hpc.models.engine.engine import import_vllm

    import_vllm("cpu")
    from vllm.config import CompilationConfig, CUDAGraphMode, SchedulerConfig, VllmConfig

    found = []
    for num_seqs in (80, LARGEST_GRAPH, 1000):
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
            scheduler_config=SchedulerConfig.default_factory(
                max_model_len=4096, max_num_seqs=num_seqs, max_num_batched_tokens=8192
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
            speculative_config=None,
            uniform_decode_query_len=1,
            performance_mode="balanced",
        )
        VllmConfig._set_cudagraph_sizes(config)  # type: ignore[arg-type]
        found.append(config.compilation_config.max_cudagraph_capture_size)
    return found


def table_bytes(num_seqs: int) -> int:
    """What vLLM's V2 model runner keeps for sampling on its device, made by its own classes on this CPU."""
    from tango_hpc.models.engine.engine import import_vllm

    import_vllm("cpu")
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    buffer_utils.is_uva_available = lambda: False  # host memory that a GPU can read
    torch.cuda.Stream = SimpleNamespace  # type: ignore[assignment, misc]
    device, vocabulary = torch.device("cpu"), SHAPE["vocab_size"]
    states = RequestState(num_seqs, 256, 512, 0, vocabulary, device, use_dense_all_token_ids=True)
    found: dict[int, int] = {}
    vllm_config: Any = SimpleNamespace(reasoning_config=None)
    sampler = Sampler(vllm_config, num_seqs, vocabulary, device, states)
    masks = StructuredOutputsWorker(num_seqs, vocabulary, device, 1, 1)
    _add_tensors([sampler.logits_processors, masks], vocabulary // 32, found)
    return sum(found.values())


def _add_tensors(value: Any, least_columns: int, found: dict[int, int]) -> None:
    """Bytes of all tensors in `value` that have a column for each entry of the vocabulary, or for 32 of them."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 2 and value.shape[1] >= least_columns:
            found[value.data_ptr()] = value.nbytes
    elif isinstance(value, list):
        for item in value:
            _add_tensors(item, least_columns, found)
    elif type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
        for item in vars(value).values():
            _add_tensors(item, least_columns, found)


def test_the_largest_graph_is_that_of_vllm() -> None:
    assert run_ranks(largest_graphs, 1) == [[160, LARGEST_GRAPH, LARGEST_GRAPH]]


def test_the_samplers_tables_are_those_of_vllm() -> None:
    engine = Engine(ModelShape.from_hf_config(SHAPE), 1, 2, on_cpu=False)
    assert run_ranks(table_bytes, 1, 3) == [sum(engine.sampler_tables(3))]
    assert sum(engine.sampler_tables(512)) / GIB == pytest.approx(0.308, abs=0.001)


def start_beside(config: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """What `make_engine` asks of an engine on a GPU of `SIZES`: of the numbers alone, as there is no GPU."""
    import torch.distributed as dist

    from tango_hpc.stages import model_worker

    model_worker.this_device = lambda: torch.device("cuda")  # type: ignore[assignment]
    size = SimpleNamespace(total_memory=SIZES[dist.get_rank()])
    torch.cuda.get_device_properties = lambda _device: size  # type: ignore[assignment]
    model_worker.RolloutEngine = lambda _path, **given: settings | given  # type: ignore[assignment, misc]
    return model_worker.make_engine(config.generator, config, "generator", load_weights=False)  # type: ignore[return-value]


def test_all_ranks_start_alike_on_gpus_of_different_sizes(tmp_path: Path) -> None:
    config, _ = prepare_small_run(tmp_path / "run", *NULLS)
    whole = config.launch.model_copy(update={"device": "cuda", "dtype": "bfloat16"})
    rollout = config.generator.rollout.model_copy(update={"kv_cache_gb": None})
    generator = config.generator.model_copy(update={"rollout": rollout})
    config = config.model_copy(update={"launch": whole, "generator": generator})
    first, second = run_ranks(start_beside, 2, config, {})
    memory = engine_memory(config, "generator", 70 * GIB)
    assert (first["max_num_seqs"], first["kv_cache_bytes"]) == (memory.num_seqs, memory.cache)
    assert second | {"gpu_share": 0} == first | {"gpu_share": 0}


def start_here(config: Config) -> tuple[int, int, str]:
    """A real engine on this CPU: the sequences that vLLM takes at once, the bytes of its cache, what the log says."""
    from tango_hpc.stages.model_worker import make_engine

    with contextlib.redirect_stdout(io.StringIO()) as log:
        engine = make_engine(config.generator, config, "generator", load_weights=True)
    started = engine.llm.llm_engine.vllm_config
    return started.scheduler_config.max_num_seqs, started.cache_config.kv_cache_memory_bytes, log.getvalue()


def test_an_engine_starts_with_what_the_plan_says(tmp_path: Path) -> None:
    """4 questions and 8 of the evaluation on two ranks, each with an engine: 4 responses of either for each."""
    config, _ = prepare_small_run(tmp_path / "run", *NULLS)
    planned = make_plan(config, gpu_gb=80, node_gb=None)["batch"]["generator"]
    assert (planned["max_num_seqs"], planned["waves"], planned["evaluation_waves"]) == (4, 1, 1)
    said = "the generator's engine takes up to 4 sequences at once, with a KV cache of 0.10 GiB"
    (first, second) = run_ranks(start_here, 2, config)
    assert first[:2] == second[:2] == (4, int(0.1 * GIB))
    assert said in first[2] and said not in second[2]
