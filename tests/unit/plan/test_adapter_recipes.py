"""`tango init --adapters` fits pairs of models onto the machines of docs/adapters.md, which has the plan's figures."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tango_hpc.base.config import load_config
from tango_hpc.commands.cli import app
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.plan.here import parse_gpus

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/adapters.md").read_text()
# Rows of the page's table: generator, verifier, machine; and GiB of the node's memory.
MACHINES = {
    "Qwen2.5-7B-Instruct | the same | H100": 110,
    "Qwen3-8B | the same | H100": 110,
    "Qwen2.5-7B-Instruct | the same | A6000": 110,
    "Qwen3-8B | the same | A6000": 110,
    "Qwen2.5-1.5B-Instruct | the same | RTX4090": 64,
    "Qwen2.5-32B-Instruct | Qwen2.5-7B-Instruct | 8xH100": 512,
}
GIB = 2**30


@functools.cache
def plan_of(name: str) -> dict[str, Any]:
    generator, verifier, gpus = name.split(" | ")
    models = ["--generator", generator, "--verifier", generator if verifier == "the same" else verifier]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        told = CliRunner().invoke(app, ["init", str(file), *models, "--gpus", gpus, "--adapters"])
        assert told.exit_code == 0, told.exception
        config = load_config(file)
    return make_plan(config, gpu_gb=parse_gpus(gpus)[1].memory_gib, node_gb=MACHINES[name])


@pytest.mark.parametrize("name", MACHINES)
def test_a_recipe_fits_its_machine(name: str) -> None:
    plan = plan_of(name)
    assert plan["fits"], plan["problems"]


@pytest.mark.parametrize("name", MACHINES)
def test_the_page_has_the_figures_of_the_plan(name: str) -> None:
    plan = plan_of(name)
    training = [phase for phase in plan["memory"]["gpu"]["phases"] if phase["phase"] not in ("rollout", "verify")]
    uploads = {role: model["upload_bytes"] for role, model in plan["models"].items()}
    figures = [
        f"{plan['memory']['gpu']['peak_bytes'] / GIB:.1f}",
        f"{max(phase['total_bytes'] for phase in training) / GIB:.1f}",
        f"{plan['memory']['node']['peak_bytes'] / GIB:.0f}",
        f"{plan['checkpoint']['bytes'] / 1e9:.1f}",
        f"{plan['batch']['generator']['kv_cache_tokens']:,} / {plan['batch']['verifier']['kv_cache_tokens']:,}",
        " / ".join(f"{size / 1e9:.0f}" for size in uploads.values()),
    ]
    row = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE, flags=re.M)
    assert row is not None and row[1].split(" | ") == figures, " | ".join(figures)


def test_two_of_7b_take_one_gpu() -> None:
    """71 GiB of the GPU, 110 of the host, 2 GB of disk a role, 60 GB of uploads in a step of either role, in which the
    other one only gets its weights.
    """
    plan = plan_of("Qwen2.5-7B-Instruct | the same | H100")
    assert plan["memory"]["gpu"]["peak_bytes"] < 71 * GIB and plan["memory"]["node"]["peak_bytes"] < 110 * GIB
    assert plan["checkpoint"]["bytes"] < 2 * 2e9
    uploads = [model["upload_bytes"] for model in plan["models"].values()]
    assert max(uploads) + max(uploads) / 2 < 60e9
