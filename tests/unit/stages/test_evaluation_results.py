"""What becomes of an evaluation's answers: one page, one table, and the summary; which checkpoints and files it
reads.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from tango_hpc.base.config import load_config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.metrics import read_evaluations
from tango_hpc.questions.benchmarks.records import GREEDY, Answer, read_answers, write_answers
from tango_hpc.questions.data.tables import read_rows
from tango_hpc.report.evaluation import write_results
from tango_hpc.runner import job
from tango_hpc.runner.enter import is_done
from tango_hpc.stages.eval_inputs import (
    evaluated_checkpoints,
    evaluated_file,
    evaluated_models,
    evaluated_roles,
    unanswered,
)
from tango_hpc.stages.stage import EVAL, TEACHER
from tests.unit.stages.test_hand_over import SHORT, Run, work_of

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


def answer(question: str, correct: bool, response: str = "text", **more) -> Answer:
    return Answer(question, f"Question {question}?", "1", GREEDY, response, 12, True, True, "1", correct, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = "</script><script>alert(1)</script><!-- $x$"
    hostile = f"<think><step>{text}</step></think><answer>\\boxed{{1}}</answer>"
    math = [answer("1", True, hostile, verdict=1, step_judgements=[1], steps=[text]), answer("2", False, verdict=1)]
    write_answers(tmp_path / "step_000010/math500.parquet", math)
    write_answers(tmp_path / "step_000010/gsm8k.parquet", [answer("a", True), answer("b", True), answer("c", False)])
    samples = [answer("1", True)] + [
        Answer("1", "q", "1", s, "r", 5, True, True, "1", s % 2 == 0, cluster=s % 2) for s in range(8)
    ]
    write_answers(tmp_path / "step_000020/math500.parquet", samples)
    judged = [
        Answer(str(i), "p", label, GREEDY, "s", 9, True, True, "0", label == "0", split="gsm8k")
        for i, label in enumerate(["0", "-1"])
    ]
    write_answers(tmp_path / "step_000020/processbench.parquet", judged)
    return tmp_path


def test_results_hold_every_model_and_the_summary_the_last(folder: Path) -> None:
    labels, names = ["step_000010", "step_000020", "step_000030"], ["math500", "gsm8k", "processbench"]
    summary = write_results(folder, labels, names)
    results = json.loads((folder / "results.json").read_text())
    assert list(results) == labels[:2]  # the third has not been asked yet
    first = results["step_000010"]
    assert first["math500"]["estimates"]["pass@1"]["value"] == 0.5
    assert first["math_average"]["estimates"]["pass@1"]["value"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert first["math_average"]["title"] == "mathematics, average of 2"
    assert "out_of_domain_average" not in first
    assert summary == {"eval.math500": 1.0, "eval.gsm8k": 2 / 3, "eval.math_average": pytest.approx(7 / 12), "eval.processbench": 0.0}  # fmt: skip
    table = (folder / "results.md").read_text()
    assert "| step_000010 | MATH-500 | 2 | 0 | 50.0 [" in table and "pass@8 of 8" in table
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_page_is_self_contained_and_hostile_answers_stay_text(folder: Path) -> None:
    write_results(folder, ["step_000010", "step_000020"], ["math500", "gsm8k", "processbench"])
    page = (folder / "answers.html").read_text()
    assert page.count("<script") == 2 and page.count("</script>") == 2  # the data and the program, nothing of theirs
    assert not re.search(r"""(?:src|href)=["']""", page)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    hostile = next(row for row in data if row["id"] == "1" and row["model"] == "step_000010")
    assert hostile["steps"] == [["</script><script>alert(1)</script><!-- $x$", 1]]
    shown = [row for row in data if row["model"] == "step_000020" and row["set"] == "math500"]
    assert len(shown) == 5  # greedy and four of eight samples
    assert "answers are shown" in page


def test_questions_that_could_not_be_asked_are_counted(tmp_path: Path) -> None:
    empty = {"num_tokens": 0, "finished": False, "well_formed": False, "answer": None, "asked": False}
    unasked = replace(answer("2", False, ""), **empty)
    cut_off = replace(answer("3", False), finished=False)
    write_answers(tmp_path / "model/math500.parquet", [answer("1", True), unasked, cut_off, replace(unasked, sample=0)])
    write_answers(tmp_path / "model/gsm8k.parquet", [answer("a", True)])
    write_results(tmp_path, ["model"], ["math500", "gsm8k"])
    results = json.loads((tmp_path / "results.json").read_text())["model"]
    assert [results[name]["facts"]["not_asked"] for name in ("math500", "gsm8k")] == [1, 0]
    assert results["math500"]["estimates"]["pass@1"]["value"] == pytest.approx(1 / 3)  # wrong, not left out
    assert results["math500"]["facts"]["cut_off"] == 1 / 4
    table = (tmp_path / "results.md").read_text()
    assert "| model | MATH-500 | 3 | 1 |" in table and "| model | GSM8K | 1 | 0 |" in table
    page = (tmp_path / "answers.html").read_text()
    assert "not asked" in page and '<td class="number">3</td><td class="number">1</td>' in page
    unasked.asked = True
    write_answers(tmp_path / "old.parquet", [unasked])
    old = pq.read_table(tmp_path / "old.parquet").drop_columns("asked")
    pq.write_table(old, tmp_path / "old.parquet")
    assert read_answers(tmp_path / "old.parquet") == [unasked]  # what earlier versions wrote


def test_a_rehearsed_evaluation_counts_what_does_not_fit_its_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, *SHORT, "generator.max_prompt_tokens=15")
    _, errors = run.rehearse("eval")
    assert errors == []
    # a tiny model's prompt has a token for each character and two for its tags
    questions = [row["question"] for row in read_rows(run.config.data.eval, ("question",))]
    too_long = sum(len(question) + 2 > 15 for question in questions)
    results = json.loads((run.directory.path / "eval/results.json").read_text())
    assert results["model"]["task"]["facts"]["not_asked"] == too_long
    assert 0 < too_long < results["model"]["task"]["questions"] == len(questions)
    _, errors = run.rehearse("train")
    assert errors == []
    assert {row["data/not_asked"] for row in read_evaluations(run.directory)} == {too_long}


def config(tmp_path: Path, *overrides: str):
    return load_config(QUICKSTART, [f"run.dir={tmp_path}/run", *overrides])


def make_checkpoints(run: Path, *names: str) -> None:
    for name in names:
        (run / "checkpoints/train" / name).mkdir(parents=True)


def test_complete_checkpoints_are_evaluated_and_no_others(tmp_path: Path) -> None:
    make_checkpoints(tmp_path / "other", "step_000020", "step_000100", "step_000100+rollout", ".step_000120")
    one = config(tmp_path, f"eval.checkpoints_of={tmp_path}/other")
    assert [path.name for path in evaluated_checkpoints(one)] == ["step_000100"]
    both = config(tmp_path, f"eval.checkpoints_of={tmp_path}/other", "eval.checkpoints=all")
    assert [path.name for path in evaluated_checkpoints(both)] == ["step_000020", "step_000100"]
    make_checkpoints(
        tmp_path / "other", "step_000139+rollout_2"
    )  # what a stop within step 140 left: 139 steps' weights
    assert [path.name for path in evaluated_checkpoints(one)] == ["step_000139+rollout_2"]
    assert evaluated_checkpoints(config(tmp_path)) == []
    make_checkpoints(tmp_path / "run", "step_000007")
    assert [path.name for path in evaluated_checkpoints(config(tmp_path))] == ["step_000007"]
    with pytest.raises(UserError, match="holds no training checkpoints"):
        evaluated_checkpoints(config(tmp_path, f"eval.checkpoints_of={tmp_path}/nowhere"))


def test_what_a_stop_within_a_step_left_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, *SHORT)
    _, errors = run.rehearse("train", ("rollout", 2))
    assert all(error.startswith("StoppedEarly") for error in errors)
    assert [path.name for path in (run.directory.path / "checkpoints/train").iterdir()] == ["step_000001+rollout"]
    events, errors = run.rehearse("eval")
    assert errors == [] and "load" in work_of(events, "verifier")
    assert json.loads((run.directory.path / "eval/results.json").read_text()).keys() == {"step_000001"}


def test_what_was_trained_since_an_evaluation_is_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, *SHORT, "checkpoint.keep=1", "eval.benchmarks=[task]")
    assert [run.rehearse(stage)[1] for stage in ("train", "eval")] == [[], []]
    assert is_done(run.directory, "eval") and unanswered(run.config, evaluated_models(run.config)) == []
    entered: list[str] = []
    monkeypatch.setattr(job, "take_lock", lambda *_: entered.append("lock") or sys.exit())
    assert job.run_attempt(run.directory, EVAL, run.config, Console()) == 0 and not entered
    (run.directory.path / "checkpoints/train/step_000002").rename(run.directory.path / "checkpoints/train/step_000009")
    with pytest.raises(SystemExit):
        job.run_attempt(run.directory, EVAL, run.config, Console())
    assert entered and unanswered(run.config, evaluated_models(run.config)) == [("step_000009", "task")]
    assert run.rehearse("eval")[1] == []
    results = json.loads((run.directory.path / "eval/results.json").read_text())
    assert list(results) == ["step_000002", "step_000009"]
    shutil.rmtree(run.directory.path / "checkpoints")  # done it stays: the models as they were are not asked instead
    entered.clear()
    assert job.run_attempt(run.directory, EVAL, run.config, Console()) == 0 and not entered


def test_models_are_loaded_for_what_is_asked_only(tmp_path: Path) -> None:
    assert evaluated_roles(config(tmp_path)) == ["generator", "verifier"]
    assert evaluated_roles(config(tmp_path, "eval.use_verifier=false")) == ["generator"]
    assert evaluated_roles(config(tmp_path, "eval.benchmarks=[processbench]")) == ["verifier"]
    assert evaluated_file(config(tmp_path, "eval.data=sets"), "gsm8k") == Path("sets/gsm8k.parquet").absolute()
    assert evaluated_file(config(tmp_path), "task") == tmp_path / "run/data/eval.parquet"


def test_all_that_is_missing_is_named_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        EVAL.check_inputs(config(tmp_path, f"eval.data={tmp_path}", "eval.benchmarks=[gsm8k, aime24]"))
    message = str(caught.value)
    assert f"no data set at {tmp_path}/gsm8k.parquet" in message and f"{tmp_path}/aime24.parquet" in message
    assert "no model folder at" in message
    with pytest.raises(UserError) as caught:  # the task's own questions are made where they are missing
        EVAL.check_inputs(config(tmp_path, "eval.benchmarks=[task]"))
    assert "no data set at" not in str(caught.value)
    with pytest.raises(UserError, match="the config has no teacher section"):
        TEACHER.check_inputs(config(tmp_path))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["eval.benchmarks=[math50]"], "eval.benchmarks.0: input should be"),
        (["eval.benchmarks=[processbench]", "verifier=null", "sft.verifier=null", "train.verifier_warmup_steps=0",
          "train.verifier_steps_per_cycle=0"], "processbench asks the verifier, and there is none"),
        (["teacher.questions=q", "teacher.output=o", "teacher.num_shards=2", "teacher.shard=2"],
         "teacher.shard: 2 is not below num_shards 2"),
    ],
)  # fmt: skip
def test_mistakes_in_the_two_sections_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        config(tmp_path, *overrides)
