"""Files of models: written for whom the umask says, and looked at as the user who will run the job."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tango_hpc.base.errors import UserError
from tango_hpc.commands import cli
from tango_hpc.models.trainer.hf_io import ShardWriter
from tango_hpc.stages.model_folder import check_files

NOBODY = 65534


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_exported_weights_have_the_mode_of_any_new_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        writer = ShardWriter(tmp_path, shard_bytes=16)
        for name in "ab":
            writer.add(name, torch.zeros(4))
        writer.close()
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert len(modes) == 3 and set(modes.values()) == {0o666 & ~umask}


@pytest.fixture
def model() -> Iterator[Path]:
    """A model folder in a place that everybody may enter, unlike those of pytest."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o755)
    folder = top / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    yield folder
    shutil.rmtree(top)


def as_nobody(check: Callable[[], object]) -> str:
    """What `check` refuses, in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            check()
        except UserError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_what_the_job_could_not_read_is_refused_before(model: Path) -> None:
    def told() -> str:
        return as_nobody(lambda: check_files(model))

    assert told() == ""
    (model / "model.safetensors").chmod(0o600)
    assert told().startswith(f"{model}/model.safetensors cannot be read by nobody") and f"a+rX {model}" in told()
    (model / "model.safetensors").chmod(0o644)
    model.chmod(0o700)
    assert "cannot be read by nobody" in told()
    model.chmod(0o755)
    (model / "tokenizer.json").unlink()
    (model / "config.json").unlink()
    assert told() == f"the model folder {model} lacks config.json, tokenizer.json"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("command", ["stop", "report"])
def test_somebody_elses_run_is_named_as_such(model: Path, command: str) -> None:
    from tests.fuzz.run_files import a_run

    _, directory, _ = a_run(model.parent)
    subprocess.run(["chmod", "-R", "a+rX", model.parent], check=True)

    def ask() -> None:
        sys.argv, told = ["tango", command, str(directory.path)], io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):
            cli.main()
        raise UserError(told.getvalue())

    told = as_nobody(ask)
    assert told.startswith("tango: you may not do this to ") and told.endswith(" belongs to root\n"), told
    assert str(directory.path) in told and len(told.splitlines()) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_runs_that_may_not_be_read_are_counted(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tango_hpc.commands.status import find_runs
    from tests.fuzz.run_files import a_run

    _, directory, _ = a_run(model.parent / "runs" / "mine")
    for folder in (model.parent / "runs", *(model.parent / "runs").rglob("*")):
        folder.chmod(0o755)
    (model.parent / "runs" / "hers").mkdir(mode=0o700)
    assert as_nobody(lambda: find_runs(model.parent / "runs")) == ""
    assert f"passed over, 1 that you may not read ({model.parent}/runs/hers)" in capfd.readouterr().err
    shutil.rmtree(directory.path)
    assert "holds none, except for 1 that you may not read" in as_nobody(lambda: find_runs(model.parent / "runs"))


def test_a_process_of_somebody_else_is_named_as_such() -> None:
    assert "belongs to another user" in str(cli.explain_mistake(PermissionError(1, "Operation not permitted")))
    assert cli.explain_mistake(OSError(5, "Input/output error")) is None
