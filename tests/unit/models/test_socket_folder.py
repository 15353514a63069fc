"""What an engine that does not start, or is killed meanwhile, leaves in the temporary folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tango_hpc.models.engine import engine
from tango_hpc.models.engine.engine import SOCKETS, socket_folder


def start_an_engine(pipe: Connection) -> None:
    with socket_folder():
        pipe.send(None)
        signal.pause()


def test_nothing_is_left_of_engines_that_failed_or_were_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(engine, "LONGEST_SOCKET_PATH", 1000)  # pytest's folder may be a deep one
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    context = multiprocessing.get_context("fork")
    starting = []
    for _ in range(2):
        here, there = context.Pipe()
        process = context.Process(target=start_an_engine, args=(there,))
        process.start()
        here.recv()
        starting.append(process)
    others = tmp_path / f"{SOCKETS}results"
    others.mkdir()
    assert len(list(tmp_path.iterdir())) == 3
    killed, alive = starting
    killed.kill()
    killed.join()
    engine._socket_folder.cache_clear()
    with pytest.raises(ValueError), socket_folder():
        assert Path(os.environ["VLLM_RPC_BASE_PATH"]).is_dir()
        assert len(list(tmp_path.iterdir())) == 3  # its own, the one that starts, and what is no such folder
        raise ValueError("no room for the cache")
    assert len(list(tmp_path.iterdir())) == 2 and others.is_dir()
    alive.kill()
    alive.join()
    with socket_folder():
        pass
    assert list(tmp_path.iterdir()) == [others]
    engine._socket_folder.cache_clear()


def test_a_socket_of_the_longest_name_fits_into_any_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    for temporary in ("/scratch/local/tmp", "/scratch/users/somebody/jobs/1234567/a/deep/folder"):
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        engine._socket_folder.cache_clear()
        sockets = engine._socket_folder()
        assert (sockets.parent == Path(temporary)) == (len(temporary) < 20)
        assert len(f"{sockets}/{uuid.uuid4()}") <= 107  # sun_path of Linux has 108 bytes, the last of them 0
    engine._socket_folder.cache_clear()
