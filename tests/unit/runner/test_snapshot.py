"""The copy of the code that a job runs: what is in it, and that nothing else runs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_provenance
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.status import run_state
from tango_hpc.commands.submit import take_job_files
from tango_hpc.runner import provenance
from tango_hpc.runner import snapshot as snapshots
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.job import run_programs
from tango_hpc.runner.provenance import PACKAGE, PACKAGE_DATA, code_checksum, package_files, record_attempt
from tango_hpc.runner.snapshot import check_runs_code_of_attempt, describe_snapshot, take_snapshot
from tango_hpc.stages.stage import TRAIN
from tests.slurm.jobs import counting_config

ROOT = Path(__file__).parents[3]


def test_the_package_is_what_it_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert declared == {"tango_hpc": list(PACKAGE_DATA)}
    listed = subprocess.run(["git", "ls-files", "tango_hpc"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = {line.removeprefix("tango_hpc/") for line in listed.stdout.splitlines()}
    assert tracked <= {file.as_posix() for file in package_files()}


def test_data_in_the_folder_of_the_package_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "checkout" / "tango_hpc"
    for name in ("a.py", "deep/b.py", "report/templates/c.html", "data/huge.parquet", "model.bin", ".cache/d.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(b"x" * 2**20)
    monkeypatch.setattr(snapshots, "PACKAGE", package)
    copy = take_snapshot(tmp_path / "snapshot")
    kept = sorted(file.relative_to(copy).as_posix() for file in copy.rglob("*") if file.is_file())
    assert kept == [
        "code_state.json",
        *(f"tango_hpc/{name}" for name in ("a.py", "deep/b.py", "report/templates/c.html")),
    ]
    assert describe_snapshot(copy) == f"The job runs a copy of the code: 3 files, 3.0 MB in {copy}"
    assert json.loads((copy / "code_state.json").read_text())["checksum"] == code_checksum(package)
    (package / "deep/b.py").write_text("y")
    assert code_checksum(package) != code_checksum(copy / "tango_hpc")


@pytest.fixture
def changed_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout of a package with an uncommitted change, from which the code is copied."""
    checkout = tmp_path / "checkout"
    source = checkout / "tango_hpc" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True)
    source.write_text("x = 'client Meier'\npassword = 'let me in'\n")
    monkeypatch.setattr(snapshots, "PACKAGE", source.parent)
    return checkout


def hold(folder: Path, text: str) -> list[str]:
    """The names of the files below `folder` that hold `text`."""
    return [file.name for file in folder.rglob("*") if file.is_file() and text in file.read_text()]


def test_uncommitted_changes_are_copied_only_where_asked_for_and_for_the_owner_alone(
    tmp_path: Path, changed_checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt_in(copy: Path, record_diff: bool) -> tuple[RunDirectory, dict[str, Any]]:
        directory = RunDirectory(tmp_path / f"run_of_{copy.name}_{record_diff}")
        directory.path.mkdir()
        monkeypatch.setattr(provenance, "PACKAGE", copy / "tango_hpc")
        record_attempt(directory, stage="train", record_diff=record_diff)
        return directory, read_provenance(directory)["attempts"][-1]["code"]["copied_from"]

    silent = take_snapshot(tmp_path / "silent")
    assert hold(silent, "client Meier") == ["a.py"], "the code that the job runs, which is what was changed"
    telling = take_snapshot(tmp_path / "telling", record_diff=True)
    assert sorted(hold(telling, "client Meier")) == ["a.py", "uncommitted.diff"]
    kept = telling / "uncommitted.diff"
    assert kept.stat().st_mode & 0o777 == 0o600 and "let me in" not in kept.read_text()
    for copy, record_diff in ((silent, True), (telling, False), (telling, True)):
        directory, code = attempt_in(copy, record_diff)
        assert len(code["commit"]) == 40 and code["changed"] == [" M tango_hpc/a.py"] and "diff" not in code
        recorded = hold(directory.path, "client Meier")
        assert recorded == ([code["diff_file"]] if copy == telling and record_diff else [])
    with monkeypatch.context() as patch:  # a job that submits another runs a copy itself
        patch.setattr(snapshots, "PACKAGE", telling / "tango_hpc")
        assert hold(take_snapshot(tmp_path / "second"), "client Meier") == ["a.py"]
        again = hold(take_snapshot(tmp_path / "third", record_diff=True), "client Meier")
        assert sorted(again) == ["a.py", "uncommitted.diff"]
    take_snapshot(telling)
    assert not kept.exists(), "the next submission has it off"


def test_a_sweep_shares_uncommitted_changes_only_where_all_its_runs_record_them(
    tmp_path: Path, changed_checkout: Path
) -> None:
    configs = [counting_config(tmp_path, f"run{number}", {"nodes": 1}) for number in range(2)]
    assert all(config.run.record_diff for config in configs)
    silent = configs[1].model_copy(update={"run": configs[1].run.model_copy(update={"record_diff": False})})
    for submitted, is_kept in ((configs, True), (configs[:1], True), ([configs[0], silent], False), ([silent], False)):
        copy = take_job_files(Profile(), tmp_path / "snapshot", submitted)
        assert (copy / "uncommitted.diff").exists() == is_kept


def test_the_copy_runs_by_itself_and_says_so(tmp_path: Path) -> None:
    copy = take_snapshot(tmp_path / "snapshot")
    code = "from pathlib import Path; from tango_hpc.runner import snapshot as s; s.check_runs_snapshot(Path(r'{}'))"
    words = [sys.executable, "-P", "-c", code.format(copy)]

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=os.environ | {"PYTHONPATH": str(path)}, capture_output=True, text=True, check=False
        )

    assert run(copy).returncode == 0, run(copy).stderr
    assert f"the code that runs is that of {ROOT}, not the copy in {copy}" in run(ROOT).stderr
    (copy / "tango_hpc/base/types.py").write_text((copy / "tango_hpc/base/types.py").read_text() + "\n")
    assert "was changed after it was copied (checksum " in run(copy).stderr


def test_a_job_in_other_code_than_its_snapshot_fails_and_says_why(tmp_path: Path) -> None:
    directory = prepare_run([TRAIN], counting_config(tmp_path, "run", {"nodes": 1}), resume=False)
    take_snapshot(directory.snapshot)
    with pytest.raises(CheckFailed, match=f"the code that runs is that of {PACKAGE.parent}, not the copy in "):
        run_programs(directory, [TRAIN], Console(file=io.StringIO()), directory.snapshot)
    assert [attempt.code for attempt in AttemptLog(directory).read()] == [78]
    assert "not the copy in" in run_state(directory, {}).detail


def test_a_rank_in_other_code_than_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    check_runs_code_of_attempt(directory)  # started by hand: nobody has said which code
    record_attempt(directory, stage="train")
    assert read_provenance(directory)["attempts"][-1]["code"]["checksum"] == code_checksum()
    check_runs_code_of_attempt(directory)
    image = tmp_path / "image" / "tango_hpc"
    image.mkdir(parents=True)
    (image / "a.py").touch()
    monkeypatch.setattr(snapshots, "PACKAGE", image)
    with pytest.raises(
        CheckFailed, match=f"this rank runs the code of {image.parent} .*the supervisor that of {ROOT} "
    ):
        check_runs_code_of_attempt(directory)
