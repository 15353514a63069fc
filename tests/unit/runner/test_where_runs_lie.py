"""Runs that are resumed from elsewhere, that were moved, that are not there, or whose names no job can have."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_provenance, update_summary
from tango_hpc.commands.cli import app
from tango_hpc.commands.status import find_runs
from tango_hpc.questions.data.tables import write_rows
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.environment import python_path
from tango_hpc.runner.job import resume_command
from tango_hpc.stages.stage import SFT, STAGES, TRAIN
from tests.slurm.jobs import counting_config

NOTHING_YET = {"attempts": [], "changes": []}
RELATIVE = (
    "run.dir=runs/x",
    "data.train=questions.parquet",
    "data.eval=./questions.parquet",
    "generator.model.path=model",
    "generator.chat_template=template.jinja",
    "sft.generator={data: answers.parquet, output: '${run.dir}/tuned', init: {path: model}}",
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and its files, in which commands are typed."""
    folder = tmp_path / "project"
    counting_config(folder, "base")
    (folder / "template.jinja").touch()
    write_rows(folder / "answers.parquet", [{"question": "a?", "solution_text": "a"}])
    monkeypatch.chdir(folder)
    return folder


def started(project: Path) -> RunDirectory:
    """The run in runs/x, told to stop after a while."""
    directory = prepare_run([TRAIN], load_config(project / "base.yaml", RELATIVE), resume=False)
    update_summary(directory, "train", "stopped", steps=3)
    return directory


def paths(config: Config) -> dict[str, Path]:
    assert config.sft.generator is not None
    return {
        "run": config.run.dir, "train": config.data.train, "eval": config.data.eval,
        "model": config.generator.model.path, "template": Path(config.generator.chat_template),
        "output": config.sft.generator.output, "benchmarks": config.eval.data,
    }  # fmt: skip


def test_the_printed_command_continues_the_run_from_any_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = started(project)
    words = shlex.split(resume_command(directory, "train"))
    monkeypatch.chdir(tmp_path)
    config = load_config(Path(words[2]))
    assert paths(config) == {
        "run": project / "runs/x", "train": project / "questions.parquet", "eval": project / "questions.parquet",
        "model": project / "model", "template": project / "template.jinja", "output": project / "runs/x/tuned",
        "benchmarks": project / "data/eval",
    }  # fmt: skip
    assert prepare_run([TRAIN], config, resume="--resume" in words).path == directory.path
    assert find_runs(tmp_path)[0].path == directory.path and len(find_runs(tmp_path)) == 1
    assert yaml.safe_load(directory.config.read_text())["run"]["dir"] == str(project / "runs/x")


def test_a_run_that_was_written_with_relative_paths(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = started(project)
    directory.config.write_text(directory.config.read_text().replace(f"{project}/", ""))
    assert yaml.safe_load(directory.config.read_text())["run"]["dir"] == "runs/x"
    same = load_config(project / "base.yaml", RELATIVE)
    monkeypatch.chdir(tmp_path)
    config = load_config(directory.config)
    assert paths(config) == paths(same)
    prepare_run([TRAIN], same, resume=True)  # no setting has changed
    assert load_config(directory.config) == same and read_provenance(directory) == NOTHING_YET


def test_a_run_that_was_moved_takes_its_files_along(project: Path, tmp_path: Path) -> None:
    started(project)
    (tmp_path / "archive").mkdir()
    (project / "runs/x").rename(tmp_path / "archive/y")
    directory = RunDirectory(tmp_path / "archive/y")
    config = load_config(directory.config)
    assert paths(config) | {"benchmarks": None} == {
        "run": directory.path, "output": directory.path / "tuned", "train": project / "questions.parquet",
        "eval": project / "questions.parquet", "model": project / "model", "template": project / "template.jinja",
        "benchmarks": None,
    }  # fmt: skip
    assert prepare_run([TRAIN], config, resume=True).path == directory.path
    assert str(project / "runs") not in directory.config.read_text() and read_provenance(directory) == NOTHING_YET
    # As the command of the first start would have it now, with settings of its own.
    moved = [f"run.dir={directory.path}", *RELATIVE[1:], "train.generator_steps=300"]
    prepare_run([TRAIN], load_config(project / "base.yaml", moved), resume=True)
    assert read_provenance(directory)["changes"] == ["train.generator_steps: 200 -> 300"]


def test_a_whole_project_that_was_moved(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(project)
    new = project.rename(tmp_path / "renamed")
    monkeypatch.chdir(new)
    config = load_config(new / "runs/x/config.yaml")
    assert config == load_config(new / "base.yaml", RELATIVE)  # eval.data too, which is in neither place
    assert prepare_run([TRAIN], config, resume=True).path == new / "runs/x"


def test_another_name_of_a_file_is_no_change_of_settings(project: Path, tmp_path: Path) -> None:
    started(project)
    (tmp_path / "link").symlink_to(project)
    names = [
        word.replace("=runs", f"={tmp_path}/link/runs").replace("=model", "=../project/model") for word in RELATIVE
    ]
    directory = prepare_run([TRAIN], load_config(project / "base.yaml", names), resume=True)
    assert read_provenance(directory) == NOTHING_YET


def test_resume_without_a_run_names_those_that_lie_near(project: Path) -> None:
    started(project)
    for mistyped in ("runs/y", "rums/x"):
        done = CliRunner().invoke(app, ["train", "base.yaml", *RELATIVE, f"run.dir={mistyped}", "--resume"])
        assert isinstance(done.exception, UserError) and done.exception.exit_code == 2
        told = str(done.exception)
        assert told.startswith(f"there is no run to resume in {project / mistyped}. Runs near it: {project}/runs/x. ")
        assert not (project / mistyped).exists()
    for stage in ("sft", "train"):
        done = CliRunner().invoke(app, ["submit", stage, "base.yaml", "--cluster", "local", "--resume"])
        assert f"There is no run near it, in {project}" not in str(done.exception)
        assert "there is no run to resume in" in str(done.exception)


def test_a_run_that_stopped_in_its_first_stage_is_resumed_by_both(project: Path) -> None:
    """As `tools/quickstart.sh --resume` does it: a run is its directory, whatever stages have begun in it."""
    config = load_config(project / "base.yaml", RELATIVE)
    directory = prepare_run([SFT], config, resume=False)
    update_summary(directory, "sft", "stopped", steps=1)
    for stage in ("sft", "train"):
        assert prepare_run([STAGES[stage]], config, resume=True).path == directory.path


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("2026-11-20T10:30", "a colon, at which Python would split PYTHONPATH"),
        ("back\\slash", "a backslash"),
        ("two\nlines", "a line break or another control character"),
    ],
)
def test_names_that_a_job_cannot_have(project: Path, name: str, told: str) -> None:
    config = load_config(project / "base.yaml", RELATIVE)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": project / name})})
    with pytest.raises(UserError, match="choose another name") as caught:
        prepare_run([TRAIN], config, resume=False)
    assert told in str(caught.value) and str(caught.value).count("\n") == 0
    assert not (project / name).exists()


def test_code_in_a_folder_with_a_colon_is_not_passed_over() -> None:
    with pytest.raises(UserError, match="/opt/a:b holds a colon"):
        python_path(Path("/opt/a:b"))


def test_runs_behind_links_are_found_once(project: Path, tmp_path: Path) -> None:
    started(project)
    elsewhere = tmp_path / "scratch"
    (project / "runs").rename(elsewhere)
    (project / "runs").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(elsewhere)
    (elsewhere / "again").symlink_to(elsewhere / "x")
    assert [run.path for run in find_runs(project)] == [project / "runs/x"]
    os.chdir(project)
    assert [run.path for run in find_runs(Path("runs"))] == [project / "runs/x"]
