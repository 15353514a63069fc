"""Which processes a rank of each stage consists of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.base.errors import UserError
from tango_hpc.stages.stage import STAGES, stages_named

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
    assert STAGES[stage].roles(load_config(QUICKSTART, [f"run.dir={tmp_path}", *overrides])) == expected


def test_a_name_that_no_stage_has_is_refused() -> None:
    with pytest.raises(
        UserError, match="there is no stage 'score'; stages are sft, train, eval, teacher, several as sft,train"
    ):
        stages_named("sft,score")
