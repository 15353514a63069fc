"""What rollouts and weight sync take from vLLM on a GPU: `RolloutEngine` itself, on a card that is not there.

The engines here are made, used and put to sleep by our own code with `device="cuda"`, so no argument or call is
repeated in a check. `stand_in_card.py` says what is vLLM's own and what stands in.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import stand_in_card
import torch
import torch.distributed as dist
from checks import Check, MovedError, NotReachedError, Results, check, expect, on_ranks, perform

from tango_hpc.base.model_shape import ModelShape
from tango_hpc.base.types import GenerationRequest, SamplingSettings
from tango_hpc.models.engine.engine import RolloutEngine, import_vllm
from tango_hpc.models.engine.weights import EngineWeights
from tango_hpc.models.layout.engine_layout import engine_layout
from tests.helpers.tiny import make_tiny_hf

LEVELS = """
import logging
from tango_hpc.models.engine.engine import import_vllm
import_vllm("cuda")
logger = logging.getLogger("vllm")
print(*{logger.getEffectiveLevel(), *(handler.level for handler in logger.handlers)}, sep=",")
"""
CACHE_BYTES = 20 * 2**20
DIMS = {"hidden_size": 128}  # heads of 32
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, tied": ("qwen2", {}),
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3, tied": ("qwen3", {}),
    "qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, untied, one key/value head": ("llama", {"num_key_value_heads": 1}),
    **{family: (family, {}) for family in ("mistral", "olmo2", "olmo3", "smollm3", "gemma3_text", "phi3", "granite")},
}

CHECKS: list[Check] = []
AT_TWO: list[Check] = []
engine_check, check_at_two = partial(check, to=CHECKS), partial(check, to=AT_TWO)


def run() -> Results:
    """All of them; this process then takes itself for one with a GPU."""
    stand_in_card.put_in()
    import_vllm("cuda")
    importlib.import_module("tango_hpc.stages.tango")
    return on_ranks(one_rank, 1) | on_ranks(two_ranks, 2)


def one_rank() -> Results:
    """The checks of an engine that one rank has alone."""
    return performed(CHECKS)


def two_ranks() -> Results:
    """Those of tensor parallelism."""
    return performed(AT_TWO)


def performed(checks: list[Check]) -> Results:
    """What the checks say of one engine after the other, in this rank."""
    with tempfile.TemporaryDirectory() as folder:
        return perform(checks, Card(Path(folder)))


class Card:
    """The stand-in's memory and the engine that uses it: one at a time, as in a role's process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pool = folder, stand_in_card.Pool()
        self.models: dict[str, Path] = {}
        self.made: tuple[Any, ...] = ()
        self.broken = False
        self._engine: RolloutEngine | None = None

    def model(self, kind: str, seed: int = 0) -> Path:
        """The folder of a random tiny model."""
        name = f"{kind}, {seed}"
        if name not in self.models:
            family, dims = FAMILIES[kind]
            out = self.folder / f"{len(self.models)}-{dist.get_rank()}"
            self.models[name] = make_tiny_hf(out, family, seed=seed, **DIMS, **dims)
        return self.models[name]

    def engine(self, load_weights: bool, kind: str = "qwen2, tied", tensor: int = 1) -> RolloutEngine:
        """The engine, made as `ModelWorker` makes it."""
        if self.made != (load_weights, kind, tensor):
            if self._engine is not None:
                self._engine.close()
                self.pool = stand_in_card.Pool()
            self._engine, self.made = None, ()
            if self.broken:  # of one that could not be made, parts are left in this process
                raise NotReachedError
            self.broken = True
            self._engine = RolloutEngine(
                self.model(kind),
                tensor=tensor,
                dtype="bfloat16",
                max_model_len=128,
                max_num_seqs=8,
                max_batched_tokens=256,
                device="cuda",
                load_weights=load_weights,
                kv_cache_bytes=CACHE_BYTES,
                gpu_share=0.5,
                enforce_eager=torch.version.cuda is None,  # the CPU build has not all that compiling imports
            )
            self.made, self.broken = (load_weights, kind, tensor), False
        assert self._engine is not None
        return self._engine


@engine_check("vLLM's libraries load", used="models/engine/engine.py", cuda_build=True)
def libraries(_card: Card) -> None:
    """Every compiled library of vLLM loads with this torch."""
    import vllm

    package = Path(str(vllm.__file__)).parent
    problems = []
    for library in sorted(package.rglob("*.so")):
        name = ".".join(library.relative_to(package.parent).with_name(library.name.split(".")[0]).parts)
        try:
            importlib.import_module(name)
        except ImportError as error:
            if "does not define module export function" not in str(error):  # loaded; it only registers kernels
                problems.append(f"{name}: {error}")
    expect(problems, [], "libraries that do not load")


@engine_check("environment variables", used="models/engine/engine.py: import_vllm, _socket_folder, _find_cache")
def variables(_card: Card) -> None:
    """vLLM reads every variable that we set for it."""
    import vllm.envs

    source = (Path(__file__).parents[2] / "tango_hpc/models/engine/engine.py").read_text()
    ours = set(re.findall(r'"(VLLM_\w+)"', source))
    if len(ours) < 5:
        raise AssertionError(f"only {ours} found in models/engine/engine.py")
    expect(sorted(ours - vllm.envs.environment_variables.keys()), [], "variables that vLLM does not know")


@engine_check("engine by external launcher", used="models/engine/engine.py: RolloutEngine, model")
def engine_starts(card: Card) -> None:
    """vLLM takes our arguments; engine, executor, worker and model are in this process, where we look for them."""
    engine = card.engine(load_weights=False)
    llm, config = engine.llm, engine.llm.llm_engine.vllm_config
    expect(type(llm.llm_engine.model_executor).__name__, "ExecutorWithExternalLauncher", "executor")
    expect(type(engine._worker).__mro__[1].__module__, "vllm.v1.worker.gpu_worker", "module of the worker")
    expect(isinstance(engine.model.lm_head, torch.nn.Module), True, "model.lm_head is a module")
    expect(config.model_config.enable_sleep_mode, True, "enable_sleep_mode")
    expect(config.model_config.logprobs_mode, "processed_logprobs", "logprobs_mode")
    expect(config.model_config.head_dtype, torch.float32, "head_dtype")
    expect(config.parallel_config.disable_custom_all_reduce, False, "disable_custom_all_reduce")
    expect(config.cache_config.gpu_memory_utilization, 0.5, "gpu_memory_utilization")
    expect(config.cache_config.enable_prefix_caching, True, "enable_prefix_caching")


@engine_check("vLLM's warnings are shown", used="models/engine/engine.py: import_vllm")
def warnings_shown(_card: Card) -> None:
    """vLLM's logger shows warnings, which name fast paths that are off, and nothing below.

    A process of its own imports vLLM: the stand-in of this one imports a part of vLLM before our variables are set.
    """
    env = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run([sys.executable, "-P", "-c", LEVELS], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MovedError(f"vLLM could not be imported: {done.stderr[-400:]}")
    expect(set(done.stdout.split()[-1].split(",")), {str(logging.WARNING)}, "levels of vLLM's logger and its handlers")


@engine_check("kv_cache_memory_bytes", used="models/engine/engine.py, models/engine/capacity.py")
def cache_size(card: Card) -> None:
    """The KV cache is as large as asked for, to a block, whatever is free on the card."""
    runner = card.engine(load_weights=False)._worker.model_runner
    cache = runner.kv_cache_config
    size = sum(tensor.size for tensor in cache.kv_cache_tensors)
    block = size // cache.num_blocks
    if not CACHE_BYTES - block < size <= CACHE_BYTES:
        raise MovedError(f"a cache of {size} bytes where kv_cache_memory_bytes says {CACHE_BYTES}")
    shape = _shape(card.model("qwen2, tied"))
    tokens = block // (2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2)
    expect(
        tokens,
        cache.kv_cache_groups[0].kv_cache_spec.block_size,
        "tokens in a block, by models/engine/capacity.py's bytes",
    )


@engine_check("sampling parameters and outputs", used="models/engine/engine.py: generate")
def generation(card: Card) -> None:
    """What we ask for reaches the runner; tokens, log-probabilities and reasons come back where we read them."""
    engine = card.engine(load_weights=False)
    requests = [GenerationRequest([7, 8, 9], seed) for seed in (3, 4)]
    generations = engine.generate(requests, SamplingSettings(0.7, 0.9, 6, (3,)))
    asked = engine._worker.model_runner.asked[-2:]
    expect([params.seed for params in asked], [3, 4], "seed of each request")
    expect({(params.temperature, params.top_p, params.logprobs) for params in asked}, {(0.7, 0.9, 0)}, "sampling")
    for generation in generations:
        expect(generation.token_ids, [stand_in_card.TOKEN] * 6, "tokens")
        expect(list(generation.logprobs), [stand_in_card.LOGPROB] * 6, "log-probabilities of the tokens")
        expect(generation.finish_reason, "length", "why it ended")
    (stopped,) = engine.generate(requests[:1], SamplingSettings(0.0, 1.0, 6, (stand_in_card.TOKEN,)))
    expect((stopped.token_ids, stopped.finish_reason), ([stand_in_card.TOKEN], "stop"), "tokens at a stop token")


@engine_check("parameters are written in place", used="models/engine/weights.py: EngineWeights")
def in_place(card: Card) -> None:
    """On a GPU the model computes with the parameters themselves: no packed copies, storage that stays."""
    engine = card.engine(load_weights=False)
    weights, parameters = EngineWeights(engine.model), dict(engine.model.named_parameters())
    for name, parameter in parameters.items():
        module, before = name.rpartition(".")[0], parameter.data_ptr()
        weights.open(module)
        weights.tensor(name).fill_(0.5)
        weights.close(module)
        expect(float(engine.model.get_parameter(name).float().mean()), 0.5, f"{name} after writing 0.5")
        expect(engine.model.get_parameter(name).data_ptr(), before, f"address of {name}")
        expect(len(list(weights.copies(name))), 1, f"copies of {name}")


@engine_check("sleep level 2, wake_up by parts", used="models/engine/engine.py: sleep, wake")
def sleep_and_forget(card: Card) -> None:
    """Weights and KV cache leave the card and nothing of them the host; they come back one after the other."""
    engine, pool = card.engine(load_weights=False), card.pool
    parts = {"weights", "kv_cache"}
    expect(parts - set(pool.tags), set(), "parts that lie outside vLLM's memory pool")
    expect(engine.forgets_when_asleep, True, "forgets_when_asleep")
    for _ in range(2):
        engine.sleep()
        expect((pool.mapped(), pool.backed_up() & parts), (set(), set()), "on the card and on the host, asleep")
        engine.wake(weights_only=True)
        expect(pool.mapped() & parts, {"weights"}, "on the card, with weights_only")
        engine.wake()
        expect(pool.mapped() & parts, parts, "on the card, awake")
        expect(pool.mapped(), set(pool.tags), "what never came back")
    engine.generate([GenerationRequest([7], 0)], SamplingSettings(0.0, 1.0, 2))


@engine_check("sleep level 1", used="models/engine/engine.py: sleep (a role that is not trained)")
def sleep_and_keep(card: Card) -> None:
    """Weights go to the host and come back, the KV cache is dropped."""
    engine, pool = card.engine(load_weights=True), card.pool
    expect(engine.forgets_when_asleep, False, "forgets_when_asleep")
    engine.sleep()
    expect((pool.mapped(), "weights" in pool.backed_up(), "kv_cache" in pool.backed_up()), (set(), True, False),
           "on the card, weights on the host, KV cache on the host")  # fmt: skip
    engine.wake()
    expect(pool.mapped(), set(pool.tags), "on the card, awake")


@engine_check("layerwise reload", used="models/engine/engine.py: reload (bench)")
def reload(card: Card) -> None:
    """vLLM's own loader brings another folder's weights into the parameters that are there."""
    engine = card.engine(load_weights=True)
    before = {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}
    other = card.model("qwen2, tied", seed=1)
    card.made = ()  # no longer that model's
    engine.reload(other)
    _compare(engine, other)
    after = {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}
    expect([name for name in before if after[name] != before[name]], [], "parameters that moved to other memory")


def _layouts(card: Card, tensor: int) -> None:
    for kind in FAMILIES:
        try:
            _compare(card.engine(load_weights=True, kind=kind, tensor=tensor), card.model(kind))
        except MovedError as error:
            raise MovedError(f"{kind}: {error}") from error


@engine_check("parameter layouts after loading, TP=1", used="models/layout/engine_layout.py")
def layouts(card: Card) -> None:
    """Names, shapes and places of all weights, as vLLM's loader leaves them: every family, tied and not."""
    _layouts(card, 1)


@engine_check("default process group survives", used="models/engine/engine.py: close")
def default_group(card: Card) -> None:
    """An engine that goes leaves this process's default group, which is not its own."""
    card.engine(load_weights=True).close()
    card._engine, card.made = None, ()
    expect(dist.is_initialized(), True, "torch.distributed.is_initialized() after the engine was closed")


@check_at_two("parameter layouts after loading, TP=2", used="models/layout/engine_layout.py")
def layouts_at_two(card: Card) -> None:
    """The same with two tensor ranks, one of them with a shared key/value head."""
    _layouts(card, 2)


def _shape(model_dir: Path) -> ModelShape:
    return ModelShape.from_hf_config(json.loads((model_dir / "config.json").read_text()))


def _compare(engine: RolloutEngine, model_dir: Path) -> None:
    """The engine's parameters are those of `engine_layout`, and hold what the folder's tensors have there."""
    from safetensors.torch import load_file

    tensors = load_file(model_dir / "model.safetensors")
    layout = engine_layout(_shape(model_dir), engine.tensor_size, engine.tensor_rank)
    expect(
        EngineWeights(engine.model).shapes(),
        {name: param.shape for name, param in layout.items()},
        "parameters and their shapes",
    )
    parameters = dict(engine.model.named_parameters())
    for name, param in layout.items():
        for piece in param.pieces:
            found = parameters[name].data[tuple(slice(*bounds) for bounds in piece.local)]
            wanted = tensors[piece.tensor][tuple(slice(*bounds) for bounds in piece.box)].to(found.dtype)
            if not torch.equal(found, wanted):
                raise MovedError(f"{name}{list(piece.local)} does not hold {piece.tensor}{list(piece.box)}")
