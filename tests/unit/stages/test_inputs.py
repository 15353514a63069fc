"""Files that a user gives: each thing that can be wrong with them has its own message, all problems at once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.errors import UserError
from tango_hpc.questions.data.tables import (
    QUESTION_COLUMNS,
    check_table,
    evenly_spaced,
    read_questions,
    read_rows,
    write_rows,
)
from tango_hpc.questions.tasks.made_files import make_missing_files
from tango_hpc.stages.model_folder import check_files
from tango_hpc.stages.stage import SFT, TRAIN
from tests.helpers.runs import small_config

ROW = {"id": "1", "question": "ab cd", "answer": "bd", "source": "test"}


def parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_each_problem_with_a_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data set at .*missing.parquet"):
        check_table(tmp_path / "missing.parquet", QUESTION_COLUMNS)
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="cannot read .*text.parquet as Parquet"):
        check_table(tmp_path / "text.parquet", QUESTION_COLUMNS)
    lacking = parquet(tmp_path / "lacking.parquet", {"id": ["1"], "question": ["x"], "source": ["s"]})
    with pytest.raises(UserError, match="lacks the column answer; it has id, question, source"):
        check_table(lacking, QUESTION_COLUMNS)
    empty = parquet(tmp_path / "empty.parquet", {name: pa.array([], pa.string()) for name in QUESTION_COLUMNS})
    with pytest.raises(UserError, match="has no rows"):
        check_table(empty, QUESTION_COLUMNS)
    whole = {name: ["a", "b"] for name in QUESTION_COLUMNS}
    numbers = parquet(tmp_path / "numbers.parquet", {**whole, "answer": [3, 4]})
    with pytest.raises(UserError, match=r"the column answer \(int64\) is not text; write its values as strings"):
        check_table(numbers, QUESTION_COLUMNS)
    words = pa.array(["a", "b"]).dictionary_encode()
    assert check_table(parquet(tmp_path / "words.parquet", {**whole, "source": words}), QUESTION_COLUMNS) == 2
    holes = parquet(tmp_path / "holes.parquet", {**{n: ["a", "b"] for n in QUESTION_COLUMNS}, "answer": ["x", None]})
    with pytest.raises(UserError, match="column answer is empty in row 1"):
        read_rows(holes, QUESTION_COLUMNS)


def test_rows_survive_writing_and_a_limit_takes_the_first(tmp_path: Path) -> None:
    write_rows(tmp_path / "new" / "rows.parquet", [ROW, {**ROW, "id": "2"}])
    assert read_rows(tmp_path / "new" / "rows.parquet", QUESTION_COLUMNS) == [ROW, {**ROW, "id": "2"}]
    assert read_rows(tmp_path / "new" / "rows.parquet", QUESTION_COLUMNS, limit=1) == [ROW]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows.parquet"]


def test_questions_come_with_their_metadata_where_it_is_text(tmp_path: Path) -> None:
    path = tmp_path / "questions.parquet"
    write_rows(path, [{**ROW, "metadata": '{"unit": "cm"}', "other": 1}])
    assert read_questions(path) == [{**ROW, "metadata": '{"unit": "cm"}'}]
    write_rows(path, [{**ROW, "metadata": {"mine": 1}}])  # somebody's own
    assert read_questions(path) == [ROW]


def test_answers_may_be_missing_where_a_majority_stands_in_for_them(tmp_path: Path) -> None:
    path = tmp_path / "questions.parquet"
    write_rows(path, [ROW, {**ROW, "id": "2", "answer": None}])
    with pytest.raises(UserError, match="column answer is empty in row 1 and 0 more.*train.majority_share"):
        read_questions(path)
    assert [row["answer"] for row in read_questions(path, need_answers=False)] == [ROW["answer"], None]
    write_rows(path, [{**ROW, "answer": None}])  # a column of nothing
    assert read_questions(path, need_answers=False) == [{**ROW, "answer": None}]


def test_a_model_folder_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model folder at .*nowhere; hint"):
        check_files(tmp_path / "nowhere", "; hint")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}'
    )
    (tmp_path / "x-1.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"lacks x-2\.safetensors, tokenizer\.json"):
        check_files(tmp_path)
    for damaged in ("", "version https://git-lfs.github.com/spec/v1", "{}", '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(UserError, match=r"index\.json is damaged, or was not downloaded whole"):
            check_files(tmp_path)


def test_all_problems_of_a_stage_come_in_one_message(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "task.last_letter=null", f"data.train={tmp_path}/t.parquet")
    with pytest.raises(UserError) as caught:
        TRAIN.check_inputs(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "t.parquet" in lines[0] and "eval.parquet" in lines[1]
    assert all("`tango sft CONFIG` writes it" in line for line in lines[2:])


def test_what_an_earlier_stage_writes_need_not_be_there_yet_and_all_else_must(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "task.last_letter=null")
    with pytest.raises(UserError) as caught:
        TRAIN.check_inputs(config, after=[SFT])
    assert [line.partition(" at ")[0] for line in str(caught.value).splitlines()] == ["no data set"] * 2
    TRAIN.check_inputs(small_config(tmp_path / "run"), after=[SFT])


def test_synthesised_files_depend_on_the_seed_alone_and_existing_ones_are_kept(tmp_path: Path) -> None:
    first, second = small_config(tmp_path / "a"), small_config(tmp_path / "b")
    make_missing_files(first)
    make_missing_files(second)
    assert first.data.train.read_bytes() == second.data.train.read_bytes()
    third = small_config(tmp_path / "c", "seed=1")
    make_missing_files(third)
    questions = {row["question"] for row in read_rows(third.data.train, QUESTION_COLUMNS)}
    assert questions.isdisjoint(row["question"] for row in read_rows(first.data.train, QUESTION_COLUMNS))
    write_rows(first.data.train, [ROW])
    make_missing_files(first)
    assert read_rows(first.data.train, QUESTION_COLUMNS) == [ROW]
    SFT.check_inputs(first)


def test_files_made_with_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    make_missing_files(config)
    SFT.check_inputs(config)
    other = small_config(tmp_path / "run", "task.last_letter.train_words=[2,3]", "task.last_letter.verifier_slip=0.1")
    with pytest.raises(UserError) as caught:
        SFT.check_inputs(other)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "train.parquet was made with other settings: words [1, 4] (the config: [2, 3])" in lines[0]
    assert "sft_verifier.parquet was made with other settings: slip 0.28 (the config: 0.1)" in lines[1]
    assert all("remove the file so that it is made anew" in line for line in lines)
    with pytest.raises(UserError, match="seed 0 .the config: 4"):
        TRAIN.check_inputs(small_config(tmp_path / "run", "seed=1"), after=[SFT])


def test_no_two_files_of_a_run_share_a_question(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "task.last_letter.sft_rows=2000", "task.last_letter.train_questions=2000",
                          "task.last_letter.eval_questions=500")  # fmt: skip
    make_missing_files(config)
    assert config.sft.generator is not None and config.sft.verifier is not None
    paths = (config.data.train, config.data.eval, config.sft.generator.data, config.sft.verifier.data)
    questions = [{row["question"] for row in read_rows(path, ("question",))} for path in paths]
    assert all(len(asked) > 300 for asked in questions)
    assert sum(map(len, questions)) == len(set().union(*questions))


def test_a_part_of_a_sorted_file_is_spread_over_it() -> None:
    rows = list(range(10))
    assert evenly_spaced(rows, 4) == [0, 2, 5, 7]
    assert evenly_spaced(rows, None) == evenly_spaced(rows, 10) == evenly_spaced(rows, 11) == rows
