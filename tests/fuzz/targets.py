"""What is fed with rubbish. Each target takes bytes, counts what it has fed in `COUNTS`, and raises where something
gives way.
"""

from __future__ import annotations

import atexit
import io
import json
import shutil
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console

from tango_hpc.base.config import Config, config_to_yaml, load_config
from tango_hpc.base.config.load import read_yaml
from tango_hpc.base.config.schema import TAGGED, ProtocolConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.dumps import RolloutRow, read_rollouts, write_rollouts
from tango_hpc.commands.plan_report import make_plan
from tango_hpc.questions.data.prepare.pipeline import prepare
from tango_hpc.questions.data.tables import QUESTION_COLUMNS, read_rows, write_rows
from tango_hpc.questions.grading import GradeItem, GradingPool
from tango_hpc.questions.grading import pool as grading
from tango_hpc.questions.grading.rules import MAX_ANSWER_CHARACTERS, RULES, shortcut
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.tasks import get_task
from tango_hpc.questions.tasks.last_letter import solution_text, verification_text
from tango_hpc.report.reading import facts, read_solution_of, show_rollouts, step_views
from tango_hpc.stages.rescore import score_dump
from tests.fuzz.choices import Choices
from tests.fuzz.run_files import damage_one

COUNTS: Counter[str] = Counter()
ROOT = Path(__file__).parents[2]
QUICK_RULES = sorted(set(RULES) - {"math", "own", "own_steps"})
OPTIONS: dict[str, dict[str, object]] = {"label": {"labels": ["yes", "te"]}}


@cache
def folder() -> Path:
    """For files of this process."""
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def workers() -> GradingPool:
    """One, with less time than in training: a hostile answer of a few pieces is over at once, or never."""
    return GradingPool(1, time_limit_seconds=1.0)


@cache
def last_letter() -> Config:
    """Enough of a configuration to score by."""
    role = {"model": {"path": "unused"}}
    data = {"train": "unused", "eval": "unused"}
    tree = {
        "run": {"dir": "unused"},
        "task": {"name": "last_letter"},
        "data": data,
        "generator": role,
        "verifier": role,
    }
    return Config.model_validate(tree)


def outputs(data: bytes) -> None:
    """Up to eight answers of models: parsed, graded by every quick rule, scored as a dump, shown.

    In half of the calls the last one is graded by a worker too, by `math` as well.
    """
    choices = Choices(data)
    rows = []
    protocol = choices.pick((TAGGED, ProtocolConfig(solution="free"), ProtocolConfig(solution="free", judge="answer")))
    config = last_letter().model_copy(update={"protocol": protocol})
    for index in range(1 + choices.number(8)):
        words = ["cat", "horse", "a"][: 1 + choices.number(3)]
        letters = "".join(word[-1] for word in words)
        solution, verification = solution_text(words, letters), verification_text(words, letters, [True] * len(words))
        solution = choices.changed_text(solution) if choices.number(3) else choices.text()
        verification = choices.changed_text(verification) if choices.number(3) else choices.text()
        task = get_task(last_letter().task)
        read = read_solution(solution, protocol)
        answer = task.answer(read)
        question = {"question": " ".join(words), "answer": letters}
        (verdict,) = task.grade_all([(question, answer)])
        items = [GradeItem(rule, choices.text(3), answer or "", OPTIONS.get(rule, {})) for rule in QUICK_RULES]
        graded_here(items)
        num_steps = len(read.steps)
        of_generator = choices.number(2) == 0
        row = RolloutRow(
            step=1 if of_generator else 2,
            role="generator" if of_generator else "verifier",
            group_id="1-0",
            response_id=str(index),
            question=" ".join(words),
            gold_answer=letters,
            prompt_ids=[7],
            response_ids=[1] * (num_steps + 1),
            response_text=solution if of_generator else verification,
            response_logprobs=[-0.1] * (num_steps + 1),
            algorithm="grpo",
            advantages=[0.0] * (num_steps + 1),
            step_end_tokens=list(range(num_steps)) if of_generator else [],
            solution_text=solution,
            solution_correct=None if of_generator else verdict.correct,
            verification_text=verification if of_generator else None,
            class_weight=None if of_generator else 1.0,
            alpha=0.5 if of_generator else None,
        )
        rows.append(row)
    if choices.number(2) == 0:
        graded_by_a_worker(
            [*items, GradeItem("math", choices.pick((choices.text(3), letters, answer or "")), answer or "")]
        )
    dump, out = folder() / "dump.parquet", folder() / "scored.parquet"
    write_rollouts(dump, rows)
    report = score_dump(dump, config, out)
    scored = read_rollouts(out)
    assert report.num_rows == len(scored) == len(rows), "rows were dropped"
    assert [row.response_id for row in scored] == [row.response_id for row in rows]
    for row in scored:
        assert row.reward is not None or row.outcome_reward is not None
        read = read_solution_of(row, protocol)
        step_views(row, read)
        facts(row, read)
    COUNTS["answers of models"] += len(rows)
    COUNTS["verifications without a verdict"] += sum(row.final_judgement == -1 for row in scored)


def graded_here(items: Sequence[GradeItem]) -> None:
    """By quick rules: none raises, so that none needs a worker."""
    for item in items:
        known = shortcut(item.rule, item.gold, item.answer, item.options)
        if len(item.answer) <= MAX_ANSWER_CHARACTERS:
            expected = RULES[item.rule](item.gold, item.answer, **item.options)
            assert known is expected, f"{item}: {known}, not {expected}"


def graded_by_a_worker(items: Sequence[GradeItem]) -> None:
    """Without shortcuts. Each has a verdict: of the quick rules the one that they give here, of `math` any that is
    counted.
    """
    given, items = items, [item for item in items if len(item.answer) <= MAX_ANSWER_CHARACTERS]
    COUNTS["answers too long to be graded"] += len(given) - len(items)
    with patch.object(grading, "shortcut", lambda *_: None):
        verdicts = workers().grade(items)
    for item, verdict in zip(items, verdicts, strict=True):
        if item.rule in QUICK_RULES:
            known = shortcut(item.rule, item.gold, item.answer, item.options)
            assert (verdict.outcome, verdict.correct) == ("graded", known), f"{item}: {verdict}"
        COUNTS[f"verdicts of workers by {item.rule}: {verdict.outcome}"] += 1
    COUNTS["answers graded by workers"] += len(items)


def shown(data: bytes) -> None:
    """A dump with one answer in the terminal: no control character of it gets there."""
    choices = Choices(data)
    directory = RunDirectory(folder() / "run of dumps")
    directory.rollouts.mkdir(parents=True, exist_ok=True)
    text = choices.text()
    row = RolloutRow(
        step=1, role="generator", group_id="1-0", response_id="0", question=choices.text(4), gold_answer=choices.text(2),
        prompt_ids=[7], response_ids=[1], response_text=text, response_logprobs=[-0.1], algorithm="grpo", advantages=[0.0],
        verification_text=choices.text(), alpha=0.5,
    )  # fmt: skip
    write_rollouts(directory.rollout_file("generator", 1), [row])
    told = io.StringIO()
    show_rollouts(directory, console=Console(file=told, width=100), limit=1)
    control = {sign for sign in told.getvalue() if unicodedata.category(sign) == "Cc" or sign in "\u202d\u202e"} - {
        "\n"
    }
    assert not control, f"in the terminal: {control}"
    COUNTS["answers shown in a terminal"] += 1


def config(data: bytes) -> None:
    """A shipped configuration with changes: read, written and read again, planned with; or refused in words."""
    choices = Choices(data)
    source = choices.pick(sorted((ROOT / "configs").glob("*.yaml")))
    path = folder() / "config.yaml"
    if choices.number(4):
        path.write_text(yaml.safe_dump(choices.changed_tree(read_yaml(source)), allow_unicode=True))
    else:
        path.write_bytes(choices.changed_bytes(source.read_bytes()))
    overrides = [choices.changed_text("train.generator_steps=5")] if choices.number(4) == 0 else []
    COUNTS["configurations"] += 1
    try:
        read = load_config(path, overrides)
        path.write_text(config_to_yaml(read))
        assert load_config(path) == read, "written and read again it is another one"
        make_plan(read, gpu_gb=80.0, node_gb=500.0)
    except UserError as error:
        assert str(error).strip()
        COUNTS["configurations that were refused in words"] += 1


RECORDS = [
    {"question": f"How many is {number} + 1?", "answer": f"It is {number + 1}.\n#### {number + 1}"}
    for number in range(6)
]


def records(data: bytes) -> None:
    """Records of a public set through `tango data`: each is kept or counted, or the file is refused in words."""
    choices = Choices(data)
    source, out = folder() / "test.jsonl", folder() / "prepared.parquet"
    content = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    if choices.number(4):
        changed = [choices.changed_tree(record) if choices.number(3) else record for record in RECORDS]
        content = b"".join(json.dumps(record).encode() + b"\n" for record in changed)
    else:
        content = choices.changed_bytes(content)
    source.write_bytes(content)
    COUNTS["files of records"] += 1
    try:
        report = prepare("gsm8k", source=str(source), out=out, split="test")
    except UserError as error:
        assert str(error).strip()
        COUNTS["files of records that were refused in words"] += 1
        return
    dropped = report.not_part + report.missing_question + report.missing_answer + report.over_long + report.duplicates
    dropped += report.conflicting_duplicates + sum(report.in_evaluation_sets.values())
    assert report.read == report.kept + dropped, "records were dropped without a count"
    rows = read_rows(out, QUESTION_COLUMNS)
    assert len(rows) == report.kept
    COUNTS["records kept"] += report.kept
    COUNTS["records dropped and counted"] += dropped


def tables(data: bytes) -> None:
    """A Parquet file of questions with other columns or damaged bytes: read, or refused in words."""
    choices = Choices(data)
    path = folder() / "questions.parquet"
    rows = [{"id": str(i), "question": f"cat {i}", "answer": "te", "source": "test"} for i in range(4)]
    if choices.number(2):
        changed = [choices.changed_tree(row) if choices.number(3) == 0 else row for row in rows]
        try:
            pq.write_table(
                pa.Table.from_pylist([row if isinstance(row, dict) else {"id": "1"} for row in changed]), path
            )
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # no file of this kind can be made
            return
    else:
        write_rows(path, rows)
        path.write_bytes(choices.changed_bytes(path.read_bytes()))
    COUNTS["tables of questions"] += 1
    try:
        read = read_rows(path, QUESTION_COLUMNS)
        task = get_task(last_letter().task)
        for row in read:
            assert isinstance(task.statement(row), str)
    except UserError as error:
        assert str(error).strip()
        COUNTS["tables of questions that were refused in words"] += 1


def run_files(data: bytes) -> None:
    """A run with one damaged file."""
    refused = damage_one(folder() / "a run", data)
    COUNTS["runs with a damaged file"] += 1
    if refused:
        COUNTS[f"runs that were refused in words for {refused}"] += 1


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (outputs, shown, config, records, tables, run_files)
}
