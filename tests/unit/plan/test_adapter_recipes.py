"""The recipes with adapters fit the machines that their names say, by the plan; docs/adapters.md has its figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.commands.plan_report import make_plan

ROOT = Path(__file__).parents[3]
# By recipe: GiB of a GPU and of its node's memory.
MACHINES = {
    "qwen2.5_7b_80gb": (80, 110),
    "qwen3_8b_80gb": (80, 110),
    "qwen2.5_7b_48gb": (48, 110),
    "qwen3_8b_48gb": (48, 110),
    "qwen2.5_1.5b_24gb": (24, 64),
    "qwen2.5_32b_7b_8x80gb": (80, 512),
}
GIB = 2**30


def plan_of(name: str) -> dict[str, Any]:
    gpu, node = MACHINES[name]
    return make_plan(load_config(ROOT / f"configs/adapters/{name}.yaml"), gpu_gb=gpu, node_gb=node)


def test_there_is_a_machine_for_every_recipe() -> None:
    assert {path.stem for path in (ROOT / "configs/adapters").glob("*.yaml")} == set(MACHINES)


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
    page = (ROOT / "docs/adapters.md").read_text()
    row = re.search(rf"^\| `{re.escape(name)}` \| [^|]+ \| (.*) \|$", page, flags=re.M)
    assert row is not None and row[1].split(" | ") == figures, " | ".join(figures)


def test_two_of_7b_take_one_gpu() -> None:
    """70 GiB of the GPU, 110 of the host, 2 GB of disk a role, 60 GB of uploads in a step of either role, in which the
    other one only gets its weights.
    """
    plan = plan_of("qwen2.5_7b_80gb")
    assert plan["memory"]["gpu"]["peak_bytes"] < 70 * GIB and plan["memory"]["node"]["peak_bytes"] < 110 * GIB
    assert plan["checkpoint"]["bytes"] < 2 * 2e9
    uploads = [model["upload_bytes"] for model in plan["models"].values()]
    assert max(uploads) + max(uploads) / 2 < 60e9
