"""Rubbish through everything that reads what a model, a user or a disk gives; `tools/fuzz.sh` does the same for
longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tango_hpc.base.config import load_config
from tango_hpc.base.errors import UserError
from tango_hpc.questions.data.prepare.pipeline import prepare
from tango_hpc.questions.data.tables import QUESTION_COLUMNS, read_rows, write_rows
from tango_hpc.questions.grading import GradeItem, Verdict
from tango_hpc.questions.grading.rules import RULES
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.stop import read_stop_request
from tango_hpc.stages.stage import TRAIN
from tests.fuzz import targets
from tests.fuzz.choices import Choices
from tests.fuzz.targets import COUNTS, QUICK_RULES, ROOT, TARGETS

RUNS = {"outputs": 120, "shown": 60, "config": 40, "records": 80, "tables": 80, "run_files": 25}
FED = {
    "outputs": ("answers of models", 400),
    "shown": ("answers shown in a terminal", 60),
    "config": ("configurations", 40),
    "records": ("files of records", 80),
    "tables": ("tables of questions", 50),
    "run_files": ("runs with a damaged file", 25),
}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_gives_way(name: str) -> None:
    COUNTS.clear()
    quiet = settings(
        max_examples=RUNS[name], deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    quiet(given(st.binary(max_size=200))(TARGETS[name]))()
    what, at_least = FED[name]
    assert COUNTS[what] >= at_least
    if name == "outputs":
        assert COUNTS["answers graded by workers"] >= 100
        assert sum(count for what, count in COUNTS.items() if what.startswith("verdicts of workers by math")) >= 20
    print(dict(COUNTS))


@pytest.mark.parametrize("rule", QUICK_RULES)
def test_answers_of_models_find_a_rule_that_raises(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gold: str, answer: str, **_: object) -> bool:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setitem(RULES, rule, broken)
    with pytest.raises(OverflowError, match="int too large"):
        TARGETS["outputs"](b"\x01\x02")


def test_answers_of_models_find_a_rule_that_a_shortcut_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "shortcut", lambda *_: None)  # as of a rule that raised there
    with pytest.raises(AssertionError, match="None, not"):
        TARGETS["outputs"](b"\x01\x02")


@pytest.mark.parametrize("outcome", ["error", "crash", "time", "memory"])
def test_answers_of_models_find_a_rule_that_gives_way_in_a_worker(
    outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GradeItem] = []

    def grade(items: list[GradeItem]) -> list[Verdict]:
        asked.extend(items)
        return [Verdict(False, outcome) for _ in items]

    monkeypatch.setattr(targets, "workers", lambda: SimpleNamespace(grade=grade))
    with pytest.raises(AssertionError, match=f"outcome='{outcome}'"):
        for number in range(40):
            TARGETS["outputs"](bytes([number]))
    assert [item.rule for item in asked] == [*QUICK_RULES, "math"]
    COUNTS.clear()
    targets.graded_by_a_worker([GradeItem("math", "1", "2")])
    assert dict(+COUNTS) == {f"verdicts of workers by math: {outcome}": 1, "answers graded by workers": 1}


def test_workers_grade_what_the_fuzzer_gives_them() -> None:
    COUNTS.clear()
    items = [GradeItem(rule, "te", "te", targets.OPTIONS.get(rule, {})) for rule in QUICK_RULES]
    targets.graded_by_a_worker([*items, GradeItem("math", "1/2", "\\frac{1}{2}"), GradeItem("math", "1", "9" * 5000)])
    assert COUNTS["answers graded by workers"] == len(QUICK_RULES) + 1
    assert COUNTS["answers too long to be graded"] == 1
    assert {name.rpartition(": ")[2] for name in COUNTS if name.startswith("verdicts of workers")} == {"graded"}


def test_choices_depend_on_the_bytes_alone() -> None:
    for data in (b"", b"\x01", bytes(range(200))):
        first, second = Choices(data), Choices(data)
        assert [first.text() for _ in range(5)] == [second.text() for _ in range(5)]
    assert Choices(b"\x02\x01").pick("abc") == "c"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[" * 9999, "test.jsonl, line 1: not JSON"),
        ('{"question": "a?", "answer": 5}', "test.jsonl, row 1: no record of gsm8k, a field is of another kind"),
        ('{"question": 5.0, "answer": "#### 5"}', "test.jsonl, row 1: no record of gsm8k"),
        ('{"question": "a?"}', "test.jsonl, row 1: a record has none of the fields answer"),
        ("\udcff", "test.jsonl is not text in UTF-8"),
    ],
)
def test_records_that_are_none_are_named(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "test.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(UserError) as refused:
        prepare("gsm8k", source=str(tmp_path / "test.jsonl"), out=tmp_path / "out.parquet", split="test")
    assert told in str(refused.value)


def test_a_table_with_damaged_pages_is_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.parquet"
    write_rows(path, [{"id": "1", "question": "a?", "answer": "a", "source": "test"}])
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(len(content) // 4) + content[4 + len(content) // 4 :])  # its footer is sound
    with pytest.raises(UserError, match=r"cannot read .*questions\.parquet as Parquet"):
        read_rows(path, QUESTION_COLUMNS)


def test_a_cell_that_is_no_text_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "questions.parquet"
    table = pa.Table.from_pylist([{"id": str(i), "answer": "te", "source": "test"} for i in range(4)])
    words = pa.array([b"cat 0", b"cat 1", b"c\xf4t 2", b"cat 3"], pa.binary()).view(pa.string())
    pq.write_table(table.append_column("question", words), path)
    with pytest.raises(UserError, match=r"questions\.parquet: column question is not text in UTF-8 in row 2: 'utf-8'"):
        read_rows(path, QUESTION_COLUMNS)


@pytest.mark.parametrize("text", ["[" * 9999, "when: 2001-13-45", "? [a]\n: 1"])
def test_what_yaml_cannot_read_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="is not valid YAML"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.generator_steps=1e30", "train.generator_steps"),
        (f"train.questions_per_step={10**30}", "train.questions_per_step: must be at most 1,000,000,000,000"),
        (
            "train.questions_per_step=1000000000",
            "responses of a step, 5,000,000,000 in all, must be at most 10,000,000",
        ),
        ("train.generator_steps=100000000", "steps of a run, 200,000,015 in all, must be at most 10,000,000"),
    ],
)
def test_numbers_that_nobody_means_are_refused(override: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(ROOT / "configs/quickstart.yaml", [override])
    assert told in str(refused.value)


def test_the_report_shows_a_damaged_config(tmp_path: Path) -> None:
    from tango_hpc.report.run_page import write_report
    from tests.fuzz.run_files import a_run

    _, directory, contents = a_run(tmp_path)
    directory.config.write_bytes(contents[directory.config] + b"\xe7\n")
    write_report(directory)
    assert yaml.safe_load(contents[directory.config])["run"]["dir"] in directory.report.read_text()
    assert json.loads(contents[directory.summary])["stages"]


def test_a_damaged_protocol_is_named_by_the_report_and_the_reader(tmp_path: Path) -> None:
    from tango_hpc.base.config.load import read_protocol
    from tango_hpc.report.run_page import write_report
    from tests.fuzz.run_files import a_run

    _, directory, contents = a_run(tmp_path)
    directory.config.write_bytes(contents[directory.config].replace(b"solution: tagged", b"solution: 5"))
    write_report(directory)
    assert "the protocol is damaged: solution: " in directory.report.read_text()
    with pytest.raises(UserError, match="the protocol is damaged: solution: input should be"):
        read_protocol(directory.config)


@pytest.mark.parametrize("name", ["config.yaml", "jobs.json", "stop", "summary.json", "lock"])
def test_a_file_of_a_run_that_is_ten_thousand_brackets_is_damaged(tmp_path: Path, name: str) -> None:
    from tests.fuzz.run_files import a_run, look

    config, directory, _ = a_run(tmp_path)
    files = {file.name: file for file in (directory.config, directory.jobs_file, directory.summary)}
    files |= {"stop": directory.stop_file, "lock": directory.lock_file}
    files[name].write_text("[" * 9999)
    look(directory)
    if name == "config.yaml":
        directory.lock_file.unlink()
        with pytest.raises(
            UserError, match="config.yaml is not valid YAML|config.yaml is damaged: it holds no settings"
        ):
            prepare_run([TRAIN], config, resume=True)
    elif name == "stop":
        request = read_stop_request(directory)
        assert request is not None and request.by == "user"


@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        ("summary.json", ["stages", "train"], "3.11"),
        ("provenance.json", ["attempts"], None),
        ("provenance.json", ["attempts", 0], 5),
        ("provenance.json", ["attempts", 0, "versions"], [5]),
        ("provenance.json", ["attempts", 0, "code"], "x"),
        ("provenance.json", ["attempts", 0, "code", "commit"], 5),
        ("provenance.json", ["attempts", 0, "changes"], ["x", [1]]),
        ("provenance.json", ["attempts", 0, "config_changes"], [{}, "x"]),
        ("provenance.json", ["attempts", 0, "command"], [None, ["x"]]),
        ("provenance.json", ["changes"], "x"),
        ("provenance.json", ["changes"], [["x"], {}]),
    ],
)
def test_a_branch_of_another_kind_is_passed_over(tmp_path: Path, name: str, where: list[Any], value: Any) -> None:
    from tests.fuzz.run_files import a_run, go_on_with

    _, directory, contents = a_run(tmp_path)
    tree = branch = json.loads(contents[directory.path / name])
    for key in where[:-1]:
        branch = branch[key]
    branch[where[-1]] = value
    assert go_on_with(tmp_path, directory.path / name, json.dumps(tree).encode()) == ""


@pytest.mark.parametrize(
    "event",
    [
        {"event": "rows_lost", "text": "lost"},
        {"event": "rows_lost", "text": "lost", "first_step": -(10**30), "last_step": 10**30},
        {"event": "checkpoint_set_aside"},
        {"event": [], "text": "x"},
    ],
)
def test_an_event_that_is_none_is_passed_over(tmp_path: Path, event: dict[str, Any]) -> None:
    from tests.fuzz.run_files import a_run, go_on_with

    _, directory, contents = a_run(tmp_path)
    row = json.dumps({"stage": "train", "step": 3} | event).encode()
    assert go_on_with(tmp_path, directory.metrics, contents[directory.metrics] + row + b"\n") == ""


@pytest.mark.parametrize(
    ("target", "data"),
    [
        ("run_files", b"\x00\x03\x00\t"),
        ("run_files", b"\xbd\x03\x00\t"),
        ("run_files", b"\x18\x16#"),
        ("run_files", b"\x01\x02\xaep"),
        ("run_files", b"\x01\x02\xae/"),
        ("run_files", b"6R\x9d"),
        ("run_files", b"\n\x02\x87p"),
        ("run_files", b"\x1f\x15"),
        ("tables", b"\xc0\xcc}"),
        ("tables", b"\x00\x00\xf6\xcb\x07"),
    ],
)
def test_what_the_fuzzer_has_found(target: str, data: bytes) -> None:
    TARGETS[target](data)


LONG = "a" * 300


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "QUICKSTART", f"data.train=/{LONG}"], "data.train: has a name of more than 255 bytes"),
        (["train", "QUICKSTART", f"run.dir=/tmp/{LONG}"], "run.dir: has a name of more than 255 bytes"),
        (["train", "QUICKSTART", 'data.train="a\\0b"'], "data.train: must not hold a null character"),
        (["train", f"/tmp/{LONG}"], "cannot read the config"),
        (["status", f"/tmp/{LONG}"], "this is no path, a name in it is too long"),
        (["report", f"/tmp/{LONG}"], "this is no path, a name in it is too long"),
    ],
)
def test_what_cannot_be_a_path_is_refused_in_words(words: list[str], told: str) -> None:
    words = [str(ROOT / "configs/quickstart.yaml") if word == "QUICKSTART" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tango_hpc.commands.cli", *words], capture_output=True, text=True
    )
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_a_base_that_cannot_be_a_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"base: {LONG}\n")
    with pytest.raises(UserError, match="base: no config file at"):
        load_config(tmp_path / "config.yaml")
