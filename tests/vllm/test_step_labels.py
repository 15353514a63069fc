"""Runs whose steps are labelled by trying: the labels are in dumps and rewards, and a step is resumed in its middle."""

from __future__ import annotations

import json

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import dumped_steps, read_rollouts
from tango_hpc.base.run.metrics import read_metrics
from tango_hpc.stages.rescore import score_rows
from tests.helpers.attempts import Attempt, make_attempts
from tests.helpers.runs import ONE_MODEL, computed, prepare_small_run
from tests.vllm.test_training import BLANK_LINES, FREE

LABELS = "algorithm.step_labels={rule: change, continuations: 2, solutions: 3, weight: 0.5}"
SETTINGS = {
    "two models": (*FREE, LABELS, "train.verifier_draws=2", "algorithm.entropy_coef=0.5"),
    "joint": (*FREE, *ONE_MODEL, LABELS, "train.joint=true", "train.verifier_steps_per_cycle=0"),
}
STOPS = {"two models": ("try_2", "verify_2"), "joint": ("try_2",)}
Runs = dict[str, dict[str, RunDirectory]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each kind of run uninterrupted and stopped."""
    folder = tmp_path_factory.mktemp("step labels")
    made: Runs = {}
    attempts, codes = [], []
    for kind, settings in SETTINGS.items():
        made[kind] = {}
        for name in ("straight", "stopped"):
            config, made[kind][name] = prepare_small_run(folder / kind / name, *settings)
            for model in config.models.values():  # which write blank lines in place of some tags
                file = model.model.path / "tokenizer.json"
                text = file.read_text()
                for token, blank in BLANK_LINES.items():
                    text = text.replace(token, json.dumps(blank))
                file.write_text(text)
        stopped = str(made[kind]["stopped"].path)
        attempts += [Attempt(str(made[kind]["straight"].path))]
        attempts += [*(Attempt(stopped, stop=(phase, 1)) for phase in STOPS[kind]), Attempt(stopped)]
        codes += [0, *[85] * len(STOPS[kind]), 0]
    assert [task.code for task in make_attempts(folder, attempts)] == codes
    return made


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_was_stopped_among_the_tries_computes_the_same(runs: Runs, kind: str) -> None:
    straight, stopped = runs[kind]["straight"], runs[kind]["stopped"]
    rows = read_metrics(straight)
    assert [computed(row) for row in read_metrics(stopped)] == [computed(row) for row in rows]
    tried = [row for row in rows if row["role"] == "verifier" or kind == "joint"]
    assert any(row.get("tokens/tried") for row in tried)
    assert all(row["seconds/try"] for row in tried if row.get("tokens/tried"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_labels_are_dumped_and_rewarded(runs: Runs, kind: str) -> None:
    run = runs[kind]["straight"]
    config, num_labelled = load_config(run.config), 0
    metrics = {row["step"]: row for row in read_metrics(run)}
    for step in dumped_steps(run.rollouts)["verifier"]:
        rows = read_rollouts(run.rollout_file("verifier", step))
        labelled = [row for row in rows if row.step_labels]
        num_labelled += len(labelled)
        assert len({row.group_id for row in labelled}) <= 3
        for row in labelled:
            assert len(row.step_labels) == len(row.step_judgements) and set(row.step_labels) <= {1, -1}
            hits = sum(a == b for a, b in zip(row.step_labels, row.step_judgements, strict=True))
            plain = float(row.final_judgement == int(bool(row.solution_correct)))
            plain += config.algorithm.format_weight * (row.format_reward or 0.0)
            assert row.reward == pytest.approx(plain + 0.5 * hits / len(row.step_labels))
        for again, one in zip(score_rows(rows, config), rows, strict=True):
            assert again.advantages == pytest.approx(one.advantages, rel=1e-5)
        assert metrics[step].get("verifier/steps_tried", 0) == sum(
            len(row.step_labels) for row in {row.group_id: row for row in labelled}.values()
        )
    assert num_labelled > 0
