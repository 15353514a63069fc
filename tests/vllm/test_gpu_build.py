"""tools/gpu_build with the CPU build of vLLM: its Python is the GPU build's, and the kernels stand in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

Results = dict[str, dict[str, str]]
OF_A_CUDA_BUILD = {
    "CUDA starts after the fork",
    "torch is a CUDA build",
    "NCCL in torch",
    "CUDA calls",
    "vLLM's libraries load",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the checks say here, and what they say after each move of `tests/helpers/gpu_build.py`."""
    out = tmp_path_factory.mktemp("gpu_build") / "results.json"
    words = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).parents[1] / "helpers/gpu_build.py"), str(out)]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert out.exists(), done.stdout + done.stderr
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_everything_is_as_the_gpu_path_takes_it(results: Results) -> None:
    assert {name for name, said in results["here"].items() if said == "-"} == OF_A_CUDA_BUILD
    assert {name: said for name, said in results["here"].items() if said not in ("ok", "-")} == {}
    assert len(results["here"]) > 20


@pytest.mark.parametrize(
    "move, said",
    [
        ("argument_gone", "unexpected keyword argument 'kv_cache_memory_bytes' (at tango_hpc/models/engine/engine.py:"),
        ("tag_renamed", "on the card, awake: {'weights'} where"),
        (
            "halves_swapped",
            "qwen2, tied: model.layers.0.mlp.gate_up_proj.weight[(0, 96), (0, 128)] does not hold model.l",
        ),
    ],
)
def test_a_failure_names_what_moved(results: Results, move: str, said: str) -> None:
    (found,) = results[move].values()
    assert said in found and "[used by " in found
