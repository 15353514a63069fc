"""Public sets become one schema: every field of every set, what is dropped, and what overlaps with evaluation sets."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tango_hpc.base.config.load import validate_tree
from tango_hpc.base.errors import UserError
from tango_hpc.commands.cli import app, main
from tango_hpc.questions.data.prepare.pipeline import check_held_out, prepare
from tango_hpc.questions.data.prepare.readers import DATA_SETS
from tango_hpc.questions.data.prepare.rows import SCHEMA, loosely_normalized, normalized, read_metadata
from tango_hpc.questions.data.prepare.sources import find_files
from tango_hpc.questions.data.tables import (
    QUESTION_COLUMNS,
    check_ids,
    check_sft_table,
    read_questions,
    read_sft_rows,
    write_rows,
)
from tango_hpc.questions.tasks.math import Math
from tango_hpc.stages.stage import TRAIN
from tests.helpers.real_data import REAL, needs_real_data

# One record of each set in its own fields, with what becomes of it: question, answer, chosen metadata.
RECORDS = {
    "gsm8k": ({"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 1,002"}, "1+1?", "1,002", {}),
    "math": (
        {"problem": "Half?", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."},
        "Half?", r"\frac{1}{2}", {"level": "Level 1", "subject": "Algebra"},
    ),
    "math500": (
        {"problem": "P", "solution": r"\boxed{3}", "answer": "3", "subject": "Algebra", "level": 2, "unique_id": "t/1"},
        "P", "3", {"level": 2},
    ),
    "aime24": ({"id": 60, "problem": "A", "answer": "025", "url": "http://x"}, "A", "025", {"url": "http://x"}),
    "aime25": ({"id": "0", "problem": "B", "answer": "70"}, "B", "70", {}),
    "amc23": ({"id": 1, "question": "C", "answer": 27.0}, "C", "27", {}),
    "olympiadbench": (
        {"id": 7, "question": "D", "context": None, "final_answer": ["$1$", "$2$"], "is_multiple_answer": True,
         "unit": "km", "error": "1e-1", "answer_type": "Numerical", "subfield": "Algebra"},
        "D", "$1$, $2$", {"several": True, "unit": "km", "error": "1e-1"},
    ),
    "boardgameqa": (
        {"proof": "", "example": "A game. Does it?", "label": "disproved", "rules": "[]", "config": "Main-depth1"},
        "A game. Does it?", "False", {"config": "Main-depth1"},
    ),
    "cruxeval": (
        {"code": "def f(x):\n    return x", "input": "'a b'", "output": "'a b'", "id": "sample_0"},
        "def f(x):\n    return x\n\nf('a b')", "'a b'", {},
    ),
    "strategyqa": (
        {"qid": "q", "term": "t", "question": "E?", "answer": False, "facts": ["F.", "G."], "evidence": []},
        "Facts:\n1. F.\n2. G.\n\nQuestion: E?", "False", {},
    ),
    "strategyqa_plain": ({"qid": "q", "question": "E?", "answer": False, "facts": ["F"]}, "E?", "no", {"facts": ["F"]}),
    "tablebench": (
        {"id": "t", "qtype": "FactChecking", "qsubtype": "MatchBased", "question": "Who?", "answer": "Chile",
         "table": {"columns": ["n", "c"], "data": [["1", "Chile"], ["2", 3]]}},
        "| n | c |\n| --- | --- |\n| 1 | Chile |\n| 2 | 3 |\n\nWho?", "Chile", {"qtype": "FactChecking"},
    ),
    "processbench": (
        {"id": "gsm8k-0", "problem": "G", "steps": ["a", "b"], "final_answer_correct": False, "label": 1},
        "G", "1", {"steps": ["a", "b"], "final_answer_correct": False},
    ),
    "eurus_rl": (
        {"data_source": "numina_olympiads", "ability": "math",
         "prompt": [{"role": "system", "content": "[ASSESS]"},
                    {"role": "user", "content": "H\n\nPresent the answer in LaTex format: \\boxed{Your answer}"}],
         "reward_model": {"ground_truth": r"\frac{1}{3}", "style": "rule"}, "extra_info": {"index": 5, "split": "train"}},
        "H", r"\frac{1}{3}", {"data_source": "numina_olympiads"},
    ),
    "eurus_sft": (
        {"id": "numina_1", "task": "Math", "dataset": "Numina", "system": "[ASSESS]", "conversations": [
            {"from": "human", "value": "I\n\nPresent the answer in LaTex format: \\boxed{Your answer}"},
            {"from": "gpt", "value": r"[OUTPUT] The answer is \boxed{4}."}]},
        "I", "4", {"data_source": "Numina"},
    ),
}  # fmt: skip


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_every_set_has_an_example_here():
    assert RECORDS.keys() == DATA_SETS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_each_set_becomes_one_row(name, tmp_path):
    record, question, answer, metadata = RECORDS[name]
    source = write(tmp_path / "in/test.jsonl", [record])
    report = prepare(name, source=str(source), out=tmp_path / "out.parquet", keep_overlap=True)
    [row] = read(tmp_path / "out.parquet")
    assert (row["question"], row["answer"], row["source"]) == (question, answer, name)
    assert row["id"].startswith(name.split("bench")[0][:4]) and report.kept == 1
    assert {key: read_metadata(row).get(key) for key in metadata} == metadata
    assert pq.read_schema(tmp_path / "out.parquet").equals(SCHEMA)


# Records as the hub sets of the paper's authors have them, and as mirrors do that were the default before.
AUTHORS_AND_MIRRORS = [
    ("aime24", {"ID": "2024-II-4", "Problem": "A", "Solution": "S", "Answer": 33}, "A", "33", {}),
    ("aime24", {"id": 60, "problem": "A", "solution": "S", "answer": "025", "url": "u", "year": "2024"}, "A", "025", {}),
    ("aime25", {"problem": "B", "answer": "70", "year": 2025, "solution": "S", "id": 0, "url": "u"}, "B", "70", {}),
    ("olympiadbench", {"question": "D", "answer": "$2 k$"}, "D", "$2 k$", {"several": None, "unit": None}),
    ("olympiadbench", {"question": "D", "answer": "$1$, $\\frac{1}{2}$"}, "D", "$1$, $\\frac{1}{2}$", {}),
    ("olympiadbench", {"question": "D", "final_answer": ["$1$"], "is_multiple_answer": False}, "D", "$1$", {"several": False}),
    ("boardgameqa", {"example": "G", "label": "proved"}, "G", "True", {}),
    ("boardgameqa", {"example": "G", "label": "unknown"}, "G", "Uncertain", {}),
    ("strategyqa", {"qid": "q", "question": "E?", "answer": True, "facts": "F."}, "Facts:\n1. F.\n\nQuestion: E?", "True", {}),
    (
        "tablebench",
        {"qtype": "NumericalReasoning", "question": "Q?", "answer": 3, "table": '{"columns": ["n"], "data": [[1]]}'},
        "| n |\n| --- |\n| 1 |\n\nQ?", "3", {},
    ),
]  # fmt: skip


@pytest.mark.parametrize("name, record, question, answer, metadata", AUTHORS_AND_MIRRORS)
def test_records_of_the_authors_sets_and_of_mirrors_are_read(name, record, question, answer, metadata, tmp_path):
    report = prepare(name, source=str(write(tmp_path / "x.jsonl", [record])), out=tmp_path / "out.parquet")
    [row] = read(tmp_path / "out.parquet")
    assert (row["question"], row["answer"]) == (question, answer)
    assert {key: read_metadata(row).get(key) for key in metadata} == metadata
    assert any("the paper's authors evaluate on" in line for line in report.lines())  # on more than this one


@pytest.mark.parametrize(
    "name, files, chosen",
    [  # as the hub sets lay them out
        ("aime24", ["aime_2024_problems.parquet"], ["aime_2024_problems.parquet"]),
        ("aime25", ["data/train-0.parquet", "part1/train-0.parquet", "part2/train-0.parquet"], ["data/train-0.parquet"]),
        ("strategyqa", ["strategyqa_test.json", "strategyqa_train.json", "strategyqa_train_filtered.json",
                        "strategyqa_train_paragraphs.json"], ["strategyqa_train.json"]),
        ("tablebench", ["TableBench.jsonl", "TableBench_DP.jsonl", "TableBench_PoT.jsonl"], ["TableBench.jsonl"]),
        ("olympiadbench", ["data/train-0.parquet"], ["data/train-0.parquet"]),
        ("olympiadbench", ["OE_TO_maths_en_COMP/a.parquet", "TP_TO_maths_en_COMP/a.parquet"],
         ["OE_TO_maths_en_COMP/a.parquet"]),
        ("boardgameqa", ["data/test-0.parquet", "data/train-0.parquet", "data/valid-0.parquet"], ["data/test-0.parquet"]),
    ],
)  # fmt: skip
def test_of_the_files_on_the_hub_those_of_the_set_are_read(name, files, chosen, tmp_path):
    for file in files:
        write(tmp_path / file, [])
    found = find_files(str(tmp_path), DATA_SETS[name].patterns(DATA_SETS[name].default_split))
    assert [file.relative_to(tmp_path).as_posix() for file in found] == chosen


def test_questions_that_are_evaluated_are_kept_at_any_length(tmp_path):
    records = [{"question": "x" * 7000 + str(n), "answer": "#### 1"} for n in range(2)]
    evaluated, trained = (write(tmp_path / f"{name}.jsonl", records) for name in ("test", "train"))
    assert prepare("gsm8k", source=str(evaluated), out=tmp_path / "e.parquet").kept == 2
    with pytest.raises(UserError, match="2 over-long questions"):
        prepare("gsm8k", source=str(trained), split="train", out=tmp_path / "t.parquet", keep_overlap=True)


def test_parts_of_a_set_that_cannot_be_graded_are_left_out_and_counted(tmp_path):
    code = RECORDS["eurus_rl"][0] | {"ability": "code"}
    source = write(tmp_path / "train.jsonl", [code, RECORDS["eurus_rl"][0]])
    report = prepare("eurus_rl", source=str(source), out=tmp_path / "o.parquet", keep_overlap=True)
    assert (report.read, report.kept, report.not_part) == (2, 1, 1)


def test_faulty_records_are_dropped_and_counted(tmp_path):
    problem = {"problem": "Compute $x+1$.", "answer": "2"}
    records = [
        problem,
        {"problem": r"Compute  \(\,x + 1\)", "answer": "2"},  # the same question, in another dress
        {"problem": "compute $x+1$", "answer": "3"},
        {"problem": "Compute $x-1$.", "answer": "0"},
        {"problem": "No answer", "answer": None},
        {"problem": " ", "answer": "1"},
        {"problem": "x" * 101, "answer": "1"},
    ]
    report = prepare("math500", source=str(write(tmp_path / "test.jsonl", records)), out=tmp_path / "o.parquet",
                     max_question_characters=100)  # fmt: skip
    assert [row["question"] for row in read(tmp_path / "o.parquet")] == ["Compute $x+1$.", "Compute $x-1$."]
    assert (report.duplicates, report.conflicting_duplicates, report.missing_answer) == (1, 1, 1)
    assert (report.missing_question, report.over_long) == (1, 1)
    saved = json.loads((tmp_path / "o.report.json").read_text())
    assert saved["kept"] == 2 and saved["examples"]["over_long"] == ["math500-6"]


GSM8K = json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n"
AS_THEY_COME = {
    "a byte-order mark": ("test.jsonl", b"\xef\xbb\xbf" + GSM8K.encode()),
    "a byte-order mark before an array": ("test.json", b"\xef\xbb\xbf[" + GSM8K.strip().encode() + b"]"),
    "gzip": ("test.jsonl.gz", gzip.compress(GSM8K.encode())),
    "gzip of JSON": ("test.json.gz", gzip.compress(b"[" + GSM8K.strip().encode() + b"]")),
    "Zstandard": ("test.jsonl.zst", pa.compress(GSM8K.encode(), codec="zstd", asbytes=True)),
    "bzip2": ("test.jsonl.bz2", bz2.compress(GSM8K.encode())),
    "JSON lines named .json": ("test.json", GSM8K.encode()),
    "Windows line ends": ("test.jsonl", GSM8K.replace("\n", "\r\n").encode()),
}


@pytest.mark.parametrize("name", AS_THEY_COME)
def test_files_are_read_as_they_come(name: str, tmp_path: Path) -> None:
    file, content = AS_THEY_COME[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / file).write_bytes(content)
    for source in (tmp_path / "data" / file, tmp_path / "data"):
        prepare("gsm8k", source=str(source), out=tmp_path / "out.parquet")
        assert [row["answer"] for row in read(tmp_path / "out.parquet")] == ["2"]


def test_a_compressed_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f'{{"question": "{i}?", "answer": "#### {i * 7919}"}}\n' for i in range(99)).encode())
    (tmp_path / "test.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="test.jsonl.gz cannot be read, or was not downloaded whole"):
        prepare("gsm8k", source=str(tmp_path / "test.jsonl.gz"), out=tmp_path / "out.parquet")


def test_what_lies_beside_the_data_is_passed_over(tmp_path: Path) -> None:
    """As `datasets` and the hub's cache leave it."""
    data = tmp_path / "snapshot"
    write(data / "a.jsonl", [{"problem": "x?", "answer": "025"}])
    for name in ("dataset_infos.json", "dataset_info.json", "state.json", ".cache/huggingface/x.json"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text('{"default": {}}')
    assert prepare("aime24", source=str(data), out=tmp_path / "out.parquet").kept == 1


@pytest.mark.parametrize(
    ("value", "answer"), [(["3", "4"], "3, 4"), ([27.0], "27"), (3, "3"), (["3", None], "3"), ([], None), (None, None)]
)
def test_an_answer_may_be_a_list_or_a_number(value, answer, tmp_path):
    other = {"problem": "other?", "answer": "1"}
    source = write(tmp_path / "test.jsonl", [{"problem": "a b", "answer": value}, other])
    prepare("math500", source=str(source), out=tmp_path / "out.parquet")
    assert [row["answer"] for row in read(tmp_path / "out.parquet")] == ([answer] if answer else []) + ["1"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"The roots are $\boxed{-2}$ and $\boxed{1}$.", "-2, 1"),
        (r"First $a = \boxed{3}$. Hence $b$ is $\boxed{4}$.", "4"),  # of another sentence: a step on the way
        (r"So $x = \boxed{5}$, that is, \boxed{5}.", "5"),
        (r"Thus \boxed{1.5} or, put another way, \boxed{1.5}. Done.", "1.5"),
        (r"\boxed{a}" + "\n\n" + r"Finally \boxed{b}, \boxed{c} and \boxed{d}", "b, c, d"),
        (r"The points are $\boxed{(-2,18)}$ and $\boxed{(8,38)}$.", "(-2,18), (8,38)"),
    ],
)
def test_several_boxes_in_the_last_sentence_are_all_the_answer(solution, answer, tmp_path):
    sets = {
        "math": {"problem": "Solve.", "solution": solution},
        "eurus_sft": {"id": "1", "task": "Math", "conversations": [{"from": "human", "value": "Solve."},
                                                                   {"from": "gpt", "value": solution}]},
    }  # fmt: skip
    for name, record in sets.items():
        source = write(tmp_path / "train.jsonl", [record])
        report = prepare(name, source=str(source), out=tmp_path / "out.parquet", keep_overlap=True)
        assert [row["answer"] for row in read(tmp_path / "out.parquet")] == [answer]
        assert report.several_answers == (", " in answer)
        assert ("several answers are boxed" in "\n".join(report.lines())) == (", " in answer)


def test_columns_of_other_programs_are_read(tmp_path: Path) -> None:
    """Polars writes string views; pandas large strings and categories; a cell of metadata may be empty."""
    text = {name: ["a", "b"] for name in QUESTION_COLUMNS}
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        table = pa.table({name: pa.array(values).cast(kind) for name, values in text.items()})
        table = table.append_column("metadata", pa.array(["{}", None]).cast(kind))
        pq.write_table(table, tmp_path / "own.parquet")
        rows = read_questions(tmp_path / "own.parquet")
        assert [row["question"] for row in rows] == ["a", "b"] and [read_metadata(row) for row in rows] == [{}, {}]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
REPLY = {"role": "assistant", "content": "2"}
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(("column", "chat"), [("messages", [*CHAT, REPLY]), ("messages", [CHAT[1], REPLY]),
                                              ("conversations", SHAREGPT)])  # fmt: skip
def test_chats_are_fine_tuned_on(column, chat, tmp_path):
    pq.write_table(pa.table({column: [chat]}), tmp_path / "chats.parquet")
    check_sft_table(tmp_path / "chats.parquet", "generator")
    assert read_sft_rows(tmp_path / "chats.parquet", "generator") == [{"question": "1+1?", "solution_text": "2"}]
    with pytest.raises(UserError, match="lacks the column question"):
        check_sft_table(tmp_path / "chats.parquet", "verifier")


@pytest.mark.parametrize("chat", [CHAT, [REPLY], [*CHAT, REPLY, CHAT[1], REPLY], [CHAT[1], {**REPLY, "content": None}]])
def test_chats_of_another_form_are_named_with_their_row(chat, tmp_path):
    pq.write_table(pa.table({"messages": [[CHAT[1], REPLY], chat]}), tmp_path / "chats.parquet")
    with pytest.raises(UserError, match="messages of row 1 is .* needs one user message and one assistant message"):
        read_sft_rows(tmp_path / "chats.parquet", "generator")


def test_a_source_that_no_rule_is_known_for_is_said() -> None:
    rows = [{"source": source} for source in ("gsm8k", "math", "eurus_rl", "mine", "mine")]
    (note,) = Math().notes(rows)
    assert note.startswith("2 of 5 questions have the source 'mine', which names no data set: they are graded as math")
    assert Math().notes(rows[:3]) == []


def test_training_rows_that_stand_in_an_evaluation_set_are_removed(tmp_path):
    held_out = [{"problem": "What is $1 + 1$?", "answer": "2"}, {"problem": "Unrelated", "answer": "2"}]
    prepare("math500", source=str(write(tmp_path / "e/test.jsonl", held_out)), out=tmp_path / "eval/math500.parquet")
    train = [
        {"question": "what is\\, 1+1 ?", "answer": "#### 2"},
        {"question": "What is 1 + 2?", "answer": "#### 3"},
    ]
    source = write(tmp_path / "train.jsonl", train)
    report = prepare(
        "gsm8k", source=str(source), split="train", out=tmp_path / "t.parquet", exclude=[tmp_path / "eval"]
    )
    assert report.in_evaluation_sets == {"math500": 1} and report.kept == 1
    assert any("1 also in math500: gsm8k-0" in line for line in report.lines())


def test_a_training_set_prepared_without_the_evaluation_set_is_refused_where_they_share_questions(tmp_path):
    def held_out(name, *questions):
        source = write(tmp_path / name / "test.jsonl", [{"problem": text, "answer": "2"} for text in questions])
        prepare("math500", source=str(source), out=tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    first, second, third = held_out("a", "What is 1 + 1?"), held_out("b", "What is 2 + 2?", "x"), held_out("c", "y")
    train = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(1, 5)]
    source, out = str(write(tmp_path / "train.jsonl", train)), tmp_path / "t.parquet"
    prepare("gsm8k", source=source, split="train", out=out, exclude=[first])
    check_held_out(out, first)
    check_held_out(out, third)  # not excluded, but shares nothing
    with pytest.raises(UserError, match=r"1 of the 2 questions of .*b\.parquet stand in .*t\.parquet.* \(a\.parquet\)"):
        check_held_out(out, second)
    tree = {
        "run": {"dir": str(tmp_path / "run")}, "task": {"name": "math"}, "verifier": None,
        "data": {"train": str(out), "eval": str(second)}, "generator": {"model": {"path": str(tmp_path)}},
        "train": {"verifier_warmup_steps": 0, "verifier_steps_per_cycle": 0},
    }  # fmt: skip
    with pytest.raises(UserError, match="1 of the 2 questions"):  # and so says the start of a run
        TRAIN.check_inputs(validate_tree(tree, "config"))
    prepare("gsm8k", source=source, split="train", out=out, keep_overlap=True)
    check_held_out(out, second)
    write_rows(out, [{"question": "What is 2 + 2?", "source": "mine"}])  # a user's own file
    check_held_out(out, second)


def test_rows_without_an_id_of_their_own_have_one_each_over_all_files(tmp_path):
    for name in ("aime_I", "aime_II"):
        write(tmp_path / f"{name}.jsonl", [{"problem": f"{name}, {i}", "answer": i} for i in range(3)])
    prepare("aime25", source=str(tmp_path), out=tmp_path / "aime.parquet")
    ids = [row["id"] for row in read(tmp_path / "aime.parquet")]
    assert ids[:3] == ["aime25-0", "aime25-1", "aime25-2"] and len(set(ids)) == 6
    write_rows(tmp_path / "own.parquet", [{"id": "1"}, {"id": "2"}, {"id": "1"}])
    with pytest.raises(UserError, match=r"own\.parquet: the id '1' stands in 2 rows, and so do 0 more"):
        check_ids(tmp_path / "own.parquet")


def test_a_training_split_without_evaluation_sets_is_refused(tmp_path):
    with pytest.raises(UserError, match="give --exclude"):
        prepare("gsm8k", source=str(tmp_path), split="train", out=tmp_path / "t.parquet")


def test_normalisation_keeps_what_makes_a_question_another():
    assert normalized(r"Find  $\dfrac{1}{2}\,x \leq 3$.") == normalized(r"find \frac{1}{2} x \le 3")
    assert normalized("x+1") != normalized("x-1")
    assert normalized("tan 22.5") != normalized("tan 225")
    assert loosely_normalized("z^4 - z^2") == loosely_normalized("z^4 + z^2")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense", "--out", "o.parquet"], "no data set 'nonsense'"),
        (["gsm8k"], "give the file to write"),
        (["math500", "--source", "/nowhere/x", "--out", "o.parquet"], "no file or folder at /nowhere/x"),
        (["last_letter", "--words", "6-2", "--out", "o.parquet"], "--words '6-2' is not a range"),
    ],
)
def test_mistakes_are_named(arguments, message):
    result = CliRunner().invoke(app, ["data", *arguments])
    assert isinstance(result.exception, UserError) and message in str(result.exception)


@pytest.mark.parametrize("option", [("--rows", "-3"), ("--slip", "7"), ("--seed", "-1"), ("--limit", "0")])
def test_numbers_that_cannot_be_are_refused(option, tmp_path):
    result = CliRunner().invoke(app, ["data", "last_letter", *option, "--out", str(tmp_path / "o.parquet")])
    assert result.exit_code == 2 and not (tmp_path / "o.parquet").exists()


def test_broken_files_are_named_with_their_line(tmp_path):
    broken = tmp_path / "test.jsonl"
    broken.write_text('{"problem": "x", "answer": "1"}\n{"problem": \n')
    with pytest.raises(UserError, match=r"test.jsonl, line 2: not JSON"):
        prepare("math500", source=str(broken), out=tmp_path / "o.parquet")
    assert not (tmp_path / "o.parquet").exists()
    with pytest.raises(UserError, match=r"none of the fields problem; it has question"):
        prepare("math500", source=str(write(broken, [{"question": "x"}])), out=tmp_path / "o.parquet")


def test_half_a_character_is_named_with_its_row(tmp_path):
    source = write(
        tmp_path / "test.jsonl", [{"problem": "1+1?", "answer": "2"}, {"problem": "x\ud800?", "answer": "2"}]
    )
    with pytest.raises(
        UserError, match=r"test.jsonl, row 2 \('math500-\S+'\): its question holds half a character \(U\+D800"
    ):
        prepare("math500", source=str(source), out=tmp_path / "o.parquet")
    assert not (tmp_path / "o.parquet").exists()


def test_the_command_makes_last_letter_sets_and_lists_all_sets(tmp_path):
    out = tmp_path / "train.parquet"
    result = CliRunner().invoke(app, ["data", "last_letter", "--rows", "50", "--words", "2-3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = read(out)
    assert len(rows) == 50 and all(2 <= len(row["question"].split()) <= 3 for row in rows)
    listing = CliRunner().invoke(app, ["data", "list"]).output
    assert all(name in listing for name in [*DATA_SETS, "last_letter"])


@pytest.mark.parametrize(
    "arguments, stray",
    [
        (["last_letter", "--limit", "5", "--exclude", "x"], "--exclude, --limit"),
        (["math500", "--rows", "50"], "--rows"),
    ],
)
def test_options_of_the_other_kind_of_set_are_refused(arguments, stray, tmp_path):
    """And not left aside, as if what was asked for had been done."""
    result = CliRunner().invoke(app, ["data", *arguments, "--out", str(tmp_path / "x.parquet")])
    assert isinstance(result.exception, UserError) and f"{arguments[0]} has no {stray};" in str(result.exception)
    assert not (tmp_path / "x.parquet").exists()


def test_an_empty_question_of_an_evaluation_set_is_named_with_its_row(tmp_path):
    mine = tmp_path / "mine.parquet"
    rows = [{"id": str(number), "question": text, "source": "mine"} for number, text in enumerate(("one", None))]
    pq.write_table(pa.Table.from_pylist(rows), mine)
    source = write(tmp_path / "train.jsonl", [RECORDS["gsm8k"][0]])
    with pytest.raises(UserError, match="column question is empty in row 1"):
        prepare("gsm8k", source=str(source), out=tmp_path / "out.parquet", split="train", exclude=[mine])


def test_an_output_that_is_no_file_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    words = ["tango", "data", "last_letter", "--rows", "5", "--out"]
    for out, said in (
        (tmp_path, f"--out {tmp_path} is a folder; name the file, {tmp_path}/last_letter.parquet, say"),
        (tmp_path / "file/train.parquet", "give another place"),
    ):
        monkeypatch.setattr(sys, "argv", [*words, str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_large_sets_are_streamed(tmp_path):
    """Memory for 8,000 rows of 5 kB: far less than the 40 MB that they take together."""
    source = tmp_path / "train.parquet"
    record = RECORDS["eurus_rl"][0]
    system = {"role": "system", "content": "s" * 5000}
    with pq.ParquetWriter(source, pa.Table.from_pylist([record]).schema) as writer:
        for start in range(0, 8_000, 2000):
            rows = [
                record | {"prompt": [system, {"role": "user", "content": f"Question {start + i}"}]} for i in range(2000)
            ]
            writer.write_table(pa.Table.from_pylist(rows, writer.schema))
    tracemalloc.start()
    report = prepare("eurus_rl", source=str(source), out=tmp_path / "o.parquet", keep_overlap=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.kept == 8_000
    assert peak < 15e6


def test_the_rows_that_the_authors_evaluate_on_are_those_of_the_docs():
    # docs/data.md, "rows there" of the sets that they evaluate accuracy on
    assert {name: data_set.authors_rows for name, data_set in DATA_SETS.items() if data_set.authors_rows} == {
        "math500": 500, "aime24": 30, "aime25": 30, "amc23": 40, "olympiadbench": 675, "boardgameqa": 15_000,
        "cruxeval": 800, "strategyqa": 2290, "tablebench": 493,
    }  # fmt: skip


@needs_real_data
@pytest.mark.parametrize(
    "name, folder, split, expected, authors_rows",
    [
        ("math500", "math500", None, 500, 500), ("aime24", "aime24", None, 30, 30), ("amc23", "amc23", None, 40, 40),
        ("olympiadbench", "olympiadbench", None, 675, 675), ("boardgameqa", "boardgameqa", None, 2000, 15_000),
        ("boardgameqa", "boardgameqa", "valid", 500, None), ("cruxeval", "cruxeval", None, 800, 800),
        ("strategyqa", "strategyqa", "dev", 229, None), ("strategyqa", "strategyqa", None, 2290, 2290),
        ("strategyqa_plain", "strategyqa", "dev", 229, None), ("tablebench", "tablebench", None, 60, 493),
        ("processbench", "processbench", None, 1400, None), ("gsm8k", "gsm8k", None, 1319, None),
    ],
)  # fmt: skip
def test_real_evaluation_sets_are_read_whole(name, folder, split, expected, authors_rows, tmp_path):
    report = prepare(name, source=str(REAL / folder), split=split, out=tmp_path / "o.parquet")
    assert (report.read, report.kept, report.authors_rows) == (expected, expected, authors_rows)


@needs_real_data
def test_real_training_problems_that_stand_in_evaluation_sets_are_found(tmp_path):
    for name in ("math500", "olympiadbench"):
        prepare(name, source=str(REAL / name), out=tmp_path / f"eval/{name}.parquet")
    report = prepare("math", source=str(REAL / "math_train"), out=tmp_path / "t.parquet", exclude=[tmp_path / "eval"])
    assert report.in_evaluation_sets == {"math500": 5, "olympiadbench": 7}
    assert report.missing_answer == 2  # their boxes are empty
