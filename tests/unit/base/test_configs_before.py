"""Each config that was shipped before configs had layers: the files and settings that resolve to the same.

`tests/data/configs_before.json` has the fingerprint of each at commit d2c60c0.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.commands.sweep import load_sweep
from tests.helpers.config_fingerprint import fingerprint
from tests.helpers.recipes import LAYERS
from tests.helpers.runs import ROOT

BEFORE = json.loads((ROOT / "tests/data/configs_before.json").read_text())
# RLOO alone kept the default of a setting that only step advantages read.
UNUSED = ("algorithm.advantages.generator.settings={}",)

NOW: dict[str, tuple[str, ...]] = {
    f"configs/paper/{name}.yaml": layers + (UNUSED if name.endswith("rloo_vanilla") else ())
    for name, layers in LAYERS.items()
}
NOW |= {
    "configs/sweeps/teacher.yaml": ("paper/teacher_shards.yaml",),
    "configs/examples/gsm8k.yaml": ("gsm8k.yaml",),
    "configs/examples/gsm8k_cpu.yaml": ("gsm8k_cpu.yaml",),
    "configs/examples/one_model.yaml": ("one_model.yaml",),
    "configs/bench_reshard.yaml": ("../tools/bench/reshard.yaml",),
    "configs/sweeps/addition.yaml": ("experiments/addition.yaml",),
    "configs/sweeps/alpha.yaml": ("experiments/alpha.yaml",),
}
NOW |= {f"configs/{name}.yaml": (f"{name}.yaml",) for name in ("quickstart", "quickstart_gpu", "addition", "pipeline")}
NOW |= {
    f"configs/last_letter/{file.name}": (f"experiments/last_letter/{file.name}",)
    for file in (ROOT / "configs/experiments/last_letter").glob("*.yaml")
}
# Low-rank adapters for one pair of models and one machine each: `tango init` writes such a file for any. Half a billion
# parameters: the same, in experiments/half_billion with the prompts that it names.
GONE = [path for path in BEFORE if path.startswith(("configs/adapters/", "configs/half_billion"))]


def test_each_has_a_place_or_a_reason() -> None:
    assert set(NOW) | set(GONE) == set(BEFORE) and len(BEFORE) == 77


@pytest.mark.parametrize("before", NOW)
def test_the_same_from_layers(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    first, *more = (name if "=" in name else f"configs/{name}" for name in NOW[before])
    if "cells:" in Path(first).read_text() or "grid:" in Path(first).read_text():
        found = fingerprint(*(cell.config for cell in load_sweep(Path(first)).cells))
    else:
        found = fingerprint(load_config(Path(first), more))
    assert found == BEFORE[before], NOW[before]
