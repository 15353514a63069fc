"""File systems that do not answer for a while."""

from __future__ import annotations

import errno
import os

import pytest

from tango_hpc.base import files
from tango_hpc.base.files import Patience


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number), "/scratch/run")


def test_errors_that_pass_are_borne_for_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(files, "_warned", set())
    patience = Patience(60)
    for seconds in (0, 30, 60):
        now[0] = seconds
        with patience:
            fail(errno.EIO)
    with patience:
        pass  # it answered
    for seconds in (100, 159):
        now[0] = seconds
        with patience:
            fail(errno.ESTALE)
    now[0] = 161
    with pytest.raises(OSError, match="Stale file handle"), patience:
        fail(errno.ESTALE)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "/scratch/run" in told[0], told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EPIPE])
def test_errors_that_stay_are_not(number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)), Patience(60):
        fail(number)


def test_a_turn_that_leaves_the_loop_does_so() -> None:
    def found() -> int:
        patience = Patience(60)
        for turn in range(5):
            with patience:
                if turn < 3:
                    fail(errno.EIO)
                return turn
        return -1

    assert found() == 3
