"""What a command does to the run directory that it enters, or does not: refused, damaged, resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tango_hpc.errors import UserError
from tango_hpc.launch.attempts import AttemptLog
from tango_hpc.launch.enter import prepare_run, prepared_run
from tango_hpc.launch.lock import RunLock
from tango_hpc.launch.provenance import record_attempt
from tango_hpc.manage.status import run_state
from tango_hpc.report.run_page import write_report
from tango_hpc.run.summary import read_provenance, read_summary, update_summary
from tests.slurm.jobs import counting_config


def test_a_refused_command_changes_nothing(tmp_path: Path) -> None:
    """Not even where settings may be changed: another process has the run."""
    config = counting_config(tmp_path, "run", {"nodes": 1})
    with pytest.raises(UserError, match="holds no run to resume; leave --resume away"):
        prepare_run(["train"], config, resume=True)
    assert not config.run.dir.exists()
    directory = prepare_run(["train"], config, resume=False)
    update_summary(directory, "train", "done")
    longer = config.model_copy(update={"train": config.train.model_copy(update={"generator_steps": 50})})

    def content() -> dict[str, bytes]:
        files = (file for file in directory.path.rglob("*") if file.is_file())
        return {str(file): file.read_bytes() for file in files}

    with RunLock(directory):
        before = content()
        with pytest.raises(UserError, match=f"process {os.getpid()} on .* is running in"):
            prepare_run(["train"], longer, resume=True)
        assert content() == before
    with prepared_run(["train"], longer, resume=True) as (_, lock):
        assert "generator_steps: 50" in directory.config.read_text()
        assert read_summary(directory)["status"] == "stopped"
        with pytest.raises(UserError, match="is running in"):  # the lock is held from then on
            prepare_run(["train"], config, resume=True)
        lock.touch()
    assert not directory.lock_file.exists()


@pytest.mark.parametrize("name", ["summary.json", "provenance.json", "progress.json", "control/jobs.json"])
@pytest.mark.parametrize("content", ["", '{"status": "ru'])
def test_a_damaged_file_that_only_shows_things_ends_nothing(tmp_path: Path, name: str, content: str) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run(["train"], config, resume=False)
    log = AttemptLog(directory)
    log.end(log.start("train"), 85, "Ctrl-C")
    record_attempt(directory, stage="train")
    update_summary(directory, "train", "stopped", steps=2)
    (directory.path / name).write_text(content)
    with pytest.raises(UserError, match="already holds a run"):
        prepare_run(["train"], config, resume=False)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"generator_steps": 50})})
    prepare_run(["train"], longer, resume=True)
    record_attempt(directory, stage="train")
    update_summary(directory, "train", "running", begins=True)
    assert read_provenance(directory)["attempts"][-1]["config_changes"] == ["train.generator_steps: 200 -> 50"]
    assert read_summary(directory)["status"] == "running"
    assert run_state(directory, {}).state == "stopped"
    write_report(directory)
    if name in ("summary.json", "provenance.json"):
        assert (directory.path / f"{name}.damaged").read_text() == content


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"run: {dir: [", b"[1, 2]"])
def test_damaged_settings_end_it_and_are_named(tmp_path: Path, content: bytes) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run(["train"], config, resume=False)
    directory.config.write_bytes(content)
    with pytest.raises(UserError, match=r"config.yaml is damaged: it holds no settings"):
        prepare_run(["train"], config, resume=True)
    assert directory.config.read_bytes() == content
