"""The teacher's solutions over shards: who answers what, what is kept, and when all is put together."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.config import load_config
from tango_hpc.base.config.schema import TeacherConfig
from tango_hpc.base.errors import CheckFailed, UserError
from tango_hpc.base.files import write_parquet
from tango_hpc.questions.data.tables import SFT_COLUMNS, check_table, write_rows
from tango_hpc.stages.teacher import _PART as PART
from tango_hpc.stages.teacher import _claim, _num_test, _part, all_parts, merge, question_chunks

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


@pytest.fixture
def settings(tmp_path: Path) -> TeacherConfig:
    rows = [{"id": f"q{i}", "question": f"Q{i}", "answer": "1", "source": "s"} for i in range(23)]
    write_rows(tmp_path / "questions.parquet", rows)
    return TeacherConfig(
        questions=tmp_path / "questions.parquet", output=tmp_path / "out", chunk_questions=4, num_shards=3, test_rows=5
    )


def fill(settings: TeacherConfig, outcome: str = "right") -> None:
    """Write all parts of this shard; every third question of it comes out wrong."""
    for index, chunk in enumerate(question_chunks(settings)):
        rows = []
        for one in chunk:
            got = "wrong" if int(one["id"][1:]) % 3 == 1 else outcome
            text = f"solution of {one['id']}" if got == "right" else None
            rows.append({"question_id": one["id"], "question": one["question"], "solution_text": text, "outcome": got})
        write_parquet(_part(settings, index), pa.Table.from_pylist(rows, PART))


def shards(settings: TeacherConfig) -> list[TeacherConfig]:
    return [settings.model_copy(update={"shard": shard}) for shard in range(settings.num_shards)]


def test_shards_take_every_question_once(settings: TeacherConfig) -> None:
    asked = [one["id"] for shard in shards(settings) for chunk in question_chunks(shard) for one in chunk]
    assert sorted(asked) == sorted(f"q{i}" for i in range(23))
    assert [len(chunk) for chunk in question_chunks(settings)] == [4, 4]
    limited = settings.model_copy(update={"max_questions": 5})
    assert [one["id"] for chunk in question_chunks(limited) for one in chunk] == ["q0", "q3"]


def test_the_last_shard_to_finish_puts_all_together(settings: TeacherConfig) -> None:
    for shard in shards(settings):
        assert all_parts(settings) is None
        fill(shard)
    report = merge(settings)
    assert report["questions"] == 23 and report["right"] == 15 and report["wrong"] == 8
    assert (report["train"], report["test"]) == (10, 5)
    assert check_table(settings.output / "train.parquet", SFT_COLUMNS["generator"]) == 10
    ids = [
        set(pq.read_table(settings.output / f"{name}.parquet")["question_id"].to_pylist()) for name in ("train", "test")
    ]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 15
    assert json.loads((settings.output / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("test_rows", "test_share", "num_test"),
    [(None, 0.1, 2), (None, 0.2, 3), (None, 0.0, 0), (None, None, 7), (40, None, 7), (0, None, 0)],  # of 15
)
def test_a_number_or_a_share_of_solutions_is_set_apart(settings, test_rows, test_share, num_test) -> None:
    settings = settings.model_copy(update={"test_rows": test_rows, "test_share": test_share})
    for shard in shards(settings):
        fill(shard)
    report = merge(settings)
    assert (report["train"], report["test"]) == (15 - num_test, num_test)
    assert pq.read_metadata(settings.output / "test.parquet").num_rows == num_test


def test_a_share_is_taken_exactly(settings: TeacherConfig) -> None:
    """As 0.1 · 70 in floats is above 7; the authors' 90% for training are 63."""
    assert _num_test(settings.model_copy(update={"test_share": 0.1}), 70) == 7


def test_a_number_and_a_share_together_are_refused(tmp_path: Path) -> None:
    teacher = ["teacher.questions=q", "teacher.output=o", "teacher.test_rows=5", "teacher.test_share=0.1"]
    with pytest.raises(UserError, match="teacher.test_share: given beside teacher.test_rows"):
        load_config(QUICKSTART, [f"run.dir={tmp_path}/run", *teacher])


def test_the_split_does_not_depend_on_how_the_work_was_cut(settings: TeacherConfig, tmp_path: Path) -> None:
    other = settings.model_copy(update={"num_shards": 1, "chunk_questions": 100, "output": tmp_path / "other"})
    for shard in [*shards(settings), other]:
        fill(shard)
    merge(settings)
    merge(other)
    for name in ("train", "test"):
        tables = [pq.read_table(one.output / f"{name}.parquet") for one in (settings, other)]
        assert tables[0].equals(tables[1])


def test_a_teacher_that_gets_nothing_right_says_so(settings: TeacherConfig) -> None:
    for shard in shards(settings):
        fill(shard, outcome="malformed")
    with pytest.raises(CheckFailed, match=r"none of the 23 questions .*'malformed': 15"):
        merge(settings)
    assert not (settings.output / "train.parquet").exists()


def test_a_folder_made_with_other_settings_is_not_added_to(settings: TeacherConfig, tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"run.dir={tmp_path}/run"])
    _claim(config, settings, "models/big")
    _claim(config, settings.model_copy(update={"shard": 2, "test_rows": None, "test_share": 0.1}), "models/big")
    with pytest.raises(CheckFailed, match=r"temperature 0\.1 -> 0\.7.*another folder"):
        _claim(config, settings.model_copy(update={"temperature": 0.7}), "models/big")
    with pytest.raises(CheckFailed, match=r"model 'models/big' -> 'models/bigger'.*another folder"):
        _claim(config, settings, "models/bigger")
    longer = load_config(QUICKSTART, [f"run.dir={tmp_path}/run", "generator.max_response_tokens=161"])
    with pytest.raises(CheckFailed, match=r"max_response_tokens 160 -> 161.*another folder"):
        _claim(longer, settings, "models/big")


def test_parts_have_one_schema_even_when_nothing_is_right(settings: TeacherConfig) -> None:
    fill(settings, outcome="cut_off")
    assert pq.read_schema(_part(settings, 0)).field("solution_text").type == pa.string()
