"""Files that only show things cost nothing but themselves when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tango_hpc.base import files
from tango_hpc.base.files import append_line, fitting, read_json, read_json_lines, set_aside


def test_a_damaged_line_is_passed_over_with_its_name_and_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n[1]\n\n{"a": 2}\n{"a": 3')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    told = capsys.readouterr().err.splitlines()
    assert [f"{path}: line {number} is damaged" in line for number, line in zip((2, 3, 4), told, strict=True)] == [
        True
    ] * 3
    append_line(path, '{"a": 4}')
    assert path.read_bytes().endswith(b'\n{"a": 3\n{"a": 4}\n')
    assert read_json_lines(path)[-1] == {"a": 4}
    append_line(tmp_path / "new.jsonl", "{}")
    assert (tmp_path / "new.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("content", [b"", b'{"status": "ru', b"\x00\x00\x00", b"[1, 2]", b"null", b"[" * 100_000])
def test_a_damaged_object_is_empty_and_named(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "summary.json"
    assert read_json(path) == {} and not files.is_damaged(path)
    path.write_bytes(content)
    assert read_json(path) == {} and files.is_damaged(path)
    assert capsys.readouterr().err == f"Warning: {path} is damaged and passed over\n"
    path.write_text(json.dumps({"status": "done"}))
    assert read_json(path) == {"status": "done"} and not files.is_damaged(path)


def test_values_of_another_kind_give_way_to_the_usual_ones() -> None:
    usual = {"steps": 0, "seconds": 1.5, "status": "", "cause": None, "stages": {}}
    fits = {"steps": 2.5, "seconds": 3, "status": "done", "cause": "none", "stages": {"train": 1}}
    assert fitting(fits, usual) == fits and fitting(fits | {"cause": None}, usual) == fits | {"cause": None}
    for wrong in (True, float("nan"), float("inf"), 10**400, -(10**400), None, "1", [1]):
        assert fitting({"steps": wrong, "seconds": wrong}, {"steps": 0, "seconds": 1.5}) == {"steps": 0, "seconds": 1.5}
    assert fitting({"status": 1, "cause": 1, "stages": [1]}, usual) == usual


def test_what_is_set_aside_is_kept(tmp_path: Path) -> None:
    names = []
    for number in range(3):
        (tmp_path / "step_000001").mkdir()
        (tmp_path / "step_000001" / "weights").write_text(str(number))
        names.append(set_aside(tmp_path / "step_000001").name)
    assert names == ["step_000001.damaged", "step_000001.damaged.2", "step_000001.damaged.3"]
    assert [(tmp_path / name / "weights").read_text() for name in names] == ["0", "1", "2"]
