"""tools/gpu_build in a process of its own: as things are here, and after names have moved in vLLM.

python tests/helpers/gpu_build.py RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/gpu_build"))


def run_with(move: Callable[[], Any], names: set[str]) -> dict[str, str]:
    """What the checks of these names say when `move` has changed vLLM; in a process that is forked for it."""
    import engine_checks
    from checks import on_ranks

    def group() -> dict[str, str]:
        with move():
            return engine_checks.performed([item for item in engine_checks.CHECKS if item.name in names])

    return on_ranks(group, 1)


def argument_gone() -> Any:
    """vLLM has another name for the bytes of the KV cache."""
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.__init__

    def without(self: Any, *args: Any, **keywords: Any) -> None:
        if "kv_cache_memory_bytes" in keywords:
            raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'kv_cache_memory_bytes'")
        make(self, *args, **keywords)

    return patch.object(EngineArgs, "__init__", without)


def tag_renamed() -> Any:
    """What is asleep is called otherwise: vLLM then logs a warning and wakes nothing."""
    from vllm.v1.executor import abstract

    return patch.object(abstract, "SLEEP_TAGS", frozenset({"weights", "cache"}))


def halves_swapped() -> Any:
    """vLLM's loader puts up in front of gate."""
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    load = Qwen2ForCausalLM.load_weights

    def swapped(self: Any, weights: Any) -> Any:
        loaded = load(self, weights)
        fused = self.model.layers[0].mlp.gate_up_proj.weight.data
        fused.copy_(fused.roll(len(fused) // 2, dims=0))
        return loaded

    return patch.object(Qwen2ForCausalLM, "load_weights", swapped)


def main() -> None:
    """All checks, then those that a move concerns."""
    import fork_checks
    import trainer_checks

    results = {"here": fork_checks.run() | trainer_checks.run()}
    import engine_checks

    # tests/vllm/test_weight_sync.py has the other layouts.
    kinds = ("qwen2, tied", "llama, untied, one key/value head")
    engine_checks.FAMILIES = {kind: engine_checks.FAMILIES[kind] for kind in kinds}
    results["here"] |= engine_checks.run()
    for move, name in (
        (argument_gone, "kv_cache_memory_bytes"),
        (tag_renamed, "sleep level 2, wake_up by parts"),
        (halves_swapped, "parameter layouts after loading, TP=1"),
    ):
        results[move.__name__] = run_with(move, {name})
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
