"""A verifier that stays of use: when it counts, what it judges, where it looks again, when its warm-up comes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.schema import AlgorithmConfig
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.errors import UserError
from tango_hpc.method.equations import ClassWeightEma
from tango_hpc.method.steady_verifier import balanced, gated_alpha, is_balanced
from tango_hpc.questions.tasks import get_task
from tango_hpc.stages.judgement_counts import JudgementCounts, RecentVerdicts
from tango_hpc.stages.responses import ReadVerification
from tango_hpc.stages.scoring import Moment
from tango_hpc.stages.steps import VerifierBatch
from tests.helpers.advantages import for_verifier
from tests.unit.method.test_successors import BAD, GOOD, RIGHT, WRONG, verifications

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, ["run.dir=/nowhere/run", *overrides])


def test_alpha_counts_only_while_j_is_above_the_threshold() -> None:
    assert [gated_alpha(0.5, j, 0.1) for j in (0.11, 0.1, 0.0, -0.4, None)] == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert [gated_alpha(0.5, j, None) for j in (0.11, -0.4, None)] == [0.5, 0.5, 0.5]


def test_j_is_that_of_this_step_and_the_four_before_it() -> None:
    recent = RecentVerdicts()
    assert recent.pooled().j is None
    useless, useful = JudgementCounts(10, 10, 5, 5, 5, 5), JudgementCounts(10, 10, 9, 1, 9, 1)
    assert recent.pooled(useful).j == pytest.approx(0.8)  # the first step counts by itself
    for _ in range(5):
        recent.add(useless)
    assert recent.is_full and recent.pooled().j == 0.0
    # One of five is useful: 29 of 50 right ones and 21 of 50 wrong ones are judged right; the oldest is left out.
    assert recent.pooled(useful).j == pytest.approx(29 / 50 - 21 / 50)
    assert recent.pooled().j == 0.0  # nothing was taken in
    again = RecentVerdicts()
    again.load_state_dict(recent.state_dict())
    assert again.pooled(useful) == recent.pooled(useful)


def test_right_and_wrong_solutions_in_balance() -> None:
    correct = [False, False, True, False, False, True, False, False]
    assert balanced(correct, 4) == [0, 1, 2, 5]  # two of each, those drawn first
    assert balanced(correct, 5) == [0, 1, 2, 3, 5]  # of an odd number one wrong one more
    assert balanced(correct, 6) == [0, 1, 2, 3, 4, 5]  # there are but two right ones
    assert balanced([True] * 3, 2) == [0, 1]
    assert [is_balanced(correct, count) for count in (4, 5, 6)] == [True, True, False]


def test_the_advantages_of_a_group_are_over_all_its_verifications() -> None:
    """A right solution is called wrong by three verifications and right by one; a wrong one is called right by two."""
    groups = [(0, 0), (0, 0), (1, 0), (1, 0), (0, 0), (0, 1)]  # solution, whether the steps are judged right
    said = {0: RIGHT, 1: WRONG}
    read: list[ReadVerification] = [
        replace(entry, response=entry.judged.response)  # any response of three tokens
        for entry in verifications(*[(said[k], GOOD if good else BAD) for k, good in groups])
    ]
    solutions = [read[0].judged, read[2].judged, read[2].judged]
    batch = VerifierBatch.score(
        read,
        [k for k, _ in groups],
        ClassWeightEma(0.8, "off"),
        drawn=solutions,
        step=3,
        hook=for_verifier(),
        moment=Moment(),
        settings=AlgorithmConfig(format_weight=0.0),
    )
    first = [float(batch.scored.advantages_N_T[i][0]) for i in (0, 1, 4, 5)]
    # Rewards 0, 0, 0, 1: mean 1/4, deviation 1/2 (divided by 3).
    assert first == pytest.approx([-0.5, -0.5, -0.5, 1.5])
    assert not np.any(batch.scored.advantages_N_T[2:4])
    metrics = batch.metrics(get_task(TaskConfig(name="last_letter")))
    assert metrics["groups_with_signal"] == 1 / 2 and metrics["verifier/agreeing_groups"] == 1 / 2
    assert metrics["verifier/judged_right_share"] == 1 / 2
    assert metrics["verifier/trained_responses"] == 6
    # All that was drawn counts for the generator: one of three solutions is right.
    assert metrics["generator/accuracy"] == pytest.approx(1 / 3) and metrics["data/questions_drawn"] == 3
    assert [row.response_id for row in batch.dump_rows()] == ["3-0-0", "3-0-1", "3-1-0", "3-1-1", "3-0-2", "3-0-3"]
    assert math.isclose(batch.weights.right, 1.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.verifier_draws=2", "train.verifier_draws: 2 needs a verifier"),
        ("algorithm.min_verifier_j=0", "algorithm.min_verifier_j: 0.0 needs a verifier"),
    ],
)
def test_each_needs_a_verifier(override: str, message: str) -> None:
    without = ("verifier=null", "train.verifier_warmup_steps=0", "train.verifier_steps_per_cycle=0")
    with pytest.raises(UserError, match=message):
        config(*without, "sft.verifier=null", override)


def test_the_threshold_needs_a_weight_to_hold_back() -> None:
    with pytest.raises(UserError, match=r"algorithm\.min_verifier_j: 0\.1 holds back the step advantages"):
        config("algorithm.min_verifier_j=0.1", "algorithm.alpha_start=0", "algorithm.alpha_end=0")
