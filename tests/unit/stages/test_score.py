"""Re-scoring a dump: the same numbers from the texts alone, and clear errors for what is no sound dump."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.dumps import RolloutRow, read_rollouts, write_rollouts
from tango_hpc.questions.tasks.last_letter import solution_text, verification_text
from tango_hpc.stages.rescore import score_dump

WORDS = ["cat", "horse"]


def make_config(task="last_letter", **algorithm) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "task": {"name": task},
            "data": {"train": "unused", "eval": "unused"},
            "generator": {"model": {"path": "unused"}},
            "verifier": {"model": {"path": "unused"}},
            "algorithm": algorithm,
        }
    )


def generator_row(index: int, letters: str, judgements: list[bool], **changes) -> RolloutRow:
    """A solution of "cat horse" whose tokens are: step 1, step 2, answer."""
    text = solution_text(WORDS, letters)
    row = RolloutRow(
        step=1,
        role="generator",
        group_id="1-0",
        response_id=f"1-0-{index}",
        question=" ".join(WORDS),
        gold_answer="te",
        prompt_ids=[7],
        response_ids=[1, 2, 3],
        response_text=text,
        response_logprobs=[-0.1] * 3,
        algorithm="grpo",
        advantages=[0.0] * 3,
        step_end_tokens=[0, 1],
        solution_text=text,
        solution_correct=False,
        verification_text=verification_text(WORDS, letters, judgements),
        alpha=0.5,
    )
    return replace(row, **changes)


def verifier_row(index: int, letters: str, judgements: list[bool], weight: float, **changes) -> RolloutRow:
    right = letters == "te"
    row = RolloutRow(
        step=2,
        role="verifier",
        group_id=f"2-{letters}",
        response_id=f"2-{letters}-{index}",
        question=" ".join(WORDS),
        gold_answer="te",
        prompt_ids=[7],
        response_ids=[1, 2],
        response_text=verification_text(WORDS, letters, judgements),
        response_logprobs=[-0.1] * 2,
        algorithm="grpo",
        advantages=[0.0] * 2,
        solution_text=solution_text(WORDS, letters),
        solution_correct=right,
        class_weight=weight,
    )
    return replace(row, **changes)


def dump() -> list[RolloutRow]:
    return [
        generator_row(0, "te", [True, True]),
        verifier_row(0, "te", [True, True], 2.0),
        generator_row(1, "ch", [False, False]),
        verifier_row(1, "te", [True, False], 2.0),
        verifier_row(0, "ch", [False, True], 0.5),
        verifier_row(1, "ch", [True, True], 0.5),
    ]


def score(rows, tmp_path, **algorithm):
    write_rollouts(tmp_path / "in.parquet", rows)
    report = score_dump(tmp_path / "in.parquet", make_config(**algorithm), tmp_path / "out.parquet")
    return report, read_rollouts(tmp_path / "out.parquet")


def test_answers_are_graded_by_the_rule_that_the_questions_source_and_metadata_name(tmp_path):
    """OlympiadBench takes an answer without the unit that is asked for, and within the tolerance that is given."""
    text = {"gold_answer": "2.50", "response_text": "<answer>\\boxed{2.51}</answer>", "step_end_tokens": []}
    texts = {**text, "solution_text": text["response_text"], "verification_text": None}
    row = generator_row(0, "te", [True, True], **texts)
    named = replace(row, response_id="1-0-1", source="olympiadbench", metadata='{"error": "0.05"}')
    _, rows = score([row, named], tmp_path, task="math")
    assert [row.outcome_reward for row in rows] == [0.0, 1.0]


def test_rewards_and_advantages_from_the_texts(tmp_path):
    report, rows = score(dump(), tmp_path, format_weight=0.8)
    assert [row.response_id for row in rows] == [row.response_id for row in dump()]
    right, wrong = rows[0], rows[2]
    assert (right.outcome_reward, wrong.outcome_reward) == (1.0, 0.0)
    assert (right.solution_correct, wrong.solution_correct) == (True, False)
    assert (right.step_judgements, wrong.step_judgements) == ([1, 1], [-1, -1])
    assert (right.step_rewards, wrong.step_rewards) == ([0.5, 0.5], [-0.5, -0.5])
    # outcome: rewards 1, 0 give ±1/√2. Steps: ±1/2 twice each, mean 0, unbiased variance 4 · (1/4) / 3 = 1/3, so
    # ±(1/2) · √3 each. Token 0 has both steps, token 1 the second, token 2 none; α = 1/2
    out, step = 1 / math.sqrt(2), math.sqrt(3) / 2
    expected = [(out + 2 * step) / 2, (out + step) / 2, out / 2]
    np.testing.assert_allclose(right.advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(wrong.advantages, [-value for value in expected], rtol=1e-6)
    # verifier: verdicts right, wrong on the right solution and wrong, right on the other; all in form: 1 + 0.8, 0.8
    assert [round(rows[i].reward, 6) for i in (1, 3, 4, 5)] == [1.8, 0.8, 1.8, 0.8]
    np.testing.assert_allclose([rows[i].advantages[0] for i in (1, 3, 4, 5)], [2 * out, -2 * out, out / 2, -out / 2])
    assert report.num_rows == 6
    assert report.num_reread == 6  # the dump above holds no judgements


def test_answers_are_found_where_training_finds_them(tmp_path):
    """A box outside of the answer element counts; of the whole text the last one."""
    steps = "<think><step>cat:t->t</step><step>horse:e->te \\boxed{t}</step></think>"
    outside = generator_row(0, "te", [True, True], response_text=steps + "\\boxed{te}")
    none = generator_row(1, "te", [True, True], response_text=steps + "te")
    _, rows = score([outside, none], tmp_path)
    assert [row.outcome_reward for row in rows] == [1.0, 0.0]
    judged = replace(verifier_row(0, "te", [True, True], 2.0), solution_text=steps + "\\boxed{te}")
    _, rows = score([judged, verifier_row(1, "te", [True, False], 2.0)], tmp_path)
    assert [row.solution_correct for row in rows] == [True, True]


def test_scoring_again_changes_nothing(tmp_path):
    _, rows = score(dump(), tmp_path)
    report, again = score(rows, tmp_path)
    assert again == rows
    assert (report.num_reread, report.max_reward_change, report.max_advantage_change) == (0, 0.0, 0.0)


def test_the_format_reward_is_by_the_rule_of_the_config(tmp_path):
    judged_once = verifier_row(0, "te", [True, True], 2.0)
    once = (judged_once.response_text or "").replace("<step>horse:ee\\boxed{CORRECT}</step>", "")
    judged_once = replace(judged_once, response_text=once)
    rows = [judged_once, verifier_row(1, "te", [True, True], 2.0)]
    # a judgement too few: less 0.8; graded, half of the shares for count, judgement and reason: 0.25, 0.2, 0.1
    for rule, format_reward in (("authors", 0.2), ("graded", 0.725)):
        _, scored = score(rows, tmp_path, verifier_format=rule)
        assert [row.format_reward for row in scored] == pytest.approx([format_reward, 1.0])
        assert [row.reward for row in scored] == pytest.approx([1 + 0.8 * format_reward, 1.8])


def test_step_rewards_that_a_dump_should_not_have_are_counted_as_a_change(tmp_path):
    _, scored = score(dump(), tmp_path)
    whole = verification_text(WORDS, "ch", [False, False])
    cut_off = {"verification_text": whole[: whole.rindex("<step>")], "step_judgements": [-1, 0], "final_judgement": -1}
    old = [replace(row, **cut_off) if row.response_id == "1-0-1" and row.role == "generator" else row for row in scored]
    report, rows = score(old, tmp_path)
    assert [row.step_rewards for row in rows if row.role == "generator"] == [[0.5, 0.5], []]
    assert (report.num_reread, report.max_reward_change) == (1, 0.5)


def test_another_algorithm(tmp_path):
    rloo = {"generator": {"name": "rloo"}, "verifier": {"name": "rloo"}}
    _, rows = score(dump(), tmp_path, advantages=rloo)
    assert {row.algorithm for row in rows} == {"rloo"}
    # outcome 1 − 0; each step 1/2 minus the mean of the three others, one 1/2 and two −1/2: 1/2 + 1/6 = 2/3
    np.testing.assert_allclose(rows[0].advantages, [(1 + 4 / 3) / 2, (1 + 2 / 3) / 2, 1 / 2])
    # ten times the step advantages, as the authors' code has it with RLOO
    _, rows = score(dump(), tmp_path, advantages={"generator": {"name": "rloo", "settings": {"step_scale": 10.0}}})
    np.testing.assert_allclose(rows[0].advantages, [(1 + 40 / 3) / 2, (1 + 20 / 3) / 2, 1 / 2])


def test_without_a_verifier_only_the_outcome_counts(tmp_path):
    alone = {"verification_text": None, "alpha": 0.0}
    _, rows = score(
        [generator_row(0, "te", [True, True], **alone), generator_row(1, "ch", [True, True], **alone)], tmp_path
    )
    np.testing.assert_allclose(rows[0].advantages, [1 / math.sqrt(2)] * 3, rtol=1e-6)
    assert rows[0].step_judgements == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_end_tokens": [0]}, "step 1, generator: response 1-0-0 has 1 step_end_tokens, .* 2 steps"),
        ({"step_end_tokens": [0, 3]}, "step ends must rise within 0..2"),
        ({"alpha": None}, "alpha must hold one number"),
        ({"alpha": 0.25}, "alpha must hold one number"),
    ],
)
def test_generator_rows_that_do_not_fit(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        score([generator_row(0, "te", [True, True], **changes), generator_row(1, "ch", [False, False])], tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solution_text": None}, "step 2, verifier: .* no solution_text"),
        ({"class_weight": None}, "class_weight of right solutions"),
        ({"class_weight": 1.0}, "class_weight of right solutions"),
    ],
)
def test_verifier_rows_that_do_not_fit(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        score(
            [verifier_row(0, "te", [True, True], 2.0, **changes), verifier_row(1, "te", [True, False], 2.0)], tmp_path
        )


def test_missing_columns_and_missing_rows_are_named(tmp_path):
    write_rollouts(tmp_path / "in.parquet", dump())
    table = pq.read_table(tmp_path / "in.parquet").drop_columns(["group_id", "alpha"])
    pq.write_table(table, tmp_path / "less.parquet")
    with pytest.raises(UserError, match="no column group_id, alpha"):
        score_dump(tmp_path / "less.parquet", make_config(), tmp_path / "out.parquet")
    with pytest.raises(UserError, match="no rows"):
        score([], tmp_path)


def test_loads_no_torch():
    code = "import tango_hpc.stages.rescore, sys; assert not {'torch', 'vllm', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
