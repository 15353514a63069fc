"""Which processes a rank of each stage consists of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.stages.processes import process_roles

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
WITHOUT_VERIFIER = [
    "verifier=null",
    "sft.verifier=null",
    "train.verifier_warmup_steps=0",
    "train.verifier_steps_per_cycle=0",
]
PROCESSBENCH = "eval.benchmarks=[processbench]"


@pytest.mark.parametrize(
    ("stage", "overrides", "expected"),
    [
        ("train", [], ["generator", "verifier"]),
        ("train", WITHOUT_VERIFIER, ["generator"]),
        ("train", ["verifier.trainable=false", *WITHOUT_VERIFIER[2:]], ["generator", "verifier"]),
        ("eval", [], ["generator", "verifier"]),
        ("eval", ["eval.use_verifier=false"], ["generator"]),
        ("eval", WITHOUT_VERIFIER, ["generator"]),
        ("eval", [PROCESSBENCH], ["verifier"]),
        ("eval", [PROCESSBENCH, "eval.use_verifier=false"], ["verifier"]),
        ("teacher", [], ["generator"]),
        ("sft", [], ["trainer"]),
    ],
)
def test_a_rank_has_one_process_for_each_role_of_its_stage(
    stage: str, overrides: list[str], expected: list[str], tmp_path: Path
) -> None:
    assert process_roles(load_config(QUICKSTART, [f"run.dir={tmp_path}", *overrides]), stage) == expected


def test_a_stage_without_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no stage 'score' has ranks"):
        process_roles(load_config(QUICKSTART, [f"run.dir={tmp_path}"]), "score")
