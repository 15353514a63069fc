"""What `tango status` shows: a line a run, Slurm's words, what the present attempt is at."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.progress import ProgressReporter
from tango_hpc.base.run.summary import update_summary
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands import status_table
from tango_hpc.commands.cli import app
from tango_hpc.commands.status import RunState, run_state, show_logs, state_of
from tango_hpc.commands.status_table import show_status, table
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog, remember_job
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.heartbeat import Beat, write_beat
from tango_hpc.runner.lock import RunLock
from tango_hpc.stages.stage import STAGES, TRAIN
from tests.helpers.fake_slurm import said
from tests.slurm.jobs import counting_config

CELL = "cells/name=rloo_learning_rate=2e-05_3f2a1b9c_seed="
RUNS = [
    RunState(f"/runs/{CELL}1", "train", "running", "verifier rollout", 120, 200, 2, "1234567_11", "RUNNING"),
    RunState(f"/runs/{CELL}2", "train", "waiting", "Priority; continues from step_000080+verify", 80, 200, 1, "1234567_12", "PENDING"),
    RunState("/runs/quick", "sft", "done", "", 800, 800, 1, "77", None),
    RunState("/runs/other", "train", "failed", "rank 3 (generator) on n2 failed in phase 'rollout':\nValueError: no", 3, 200, 3),
    RunState("/runs/held", "train", "running", "", 3, 200, 3, "78", "SUSPENDED"),
    RunState("/runs/gone", "train", "lost", "ended without a word", 3, 200, 3, "79"),
]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_line_a_run_in_the_words_of_squeue(width: int) -> None:
    lines, cut = table(Path("/runs"), RUNS, width)
    texts = [line.plain for line in lines]
    assert len(texts) == 7 and max(map(len, texts)) <= width and cut == (width < 200)
    assert [text.split()[2] for text in texts] == [
        "STATE", "RUNNING", "PENDING", "COMPLETED", "FAILED", "SUSPENDED", "LOST"
    ]  # fmt: skip
    for text, end in zip(texts[1:3], "12", strict=True):
        assert f"1b9c_seed={end} train" in text and f" 1234567_1{end} " in text
    assert texts[1].endswith(" verifier rollout") and texts[2].endswith("step_000080+verify" if width == 200 else "…")


def test_nothing_is_cut_of_what_goes_into_a_pipe_and_all_is_shown_of_one_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.control.mkdir(parents=True)
    directory.config.touch()
    log = AttemptLog(directory)
    reason = "the models are not there: " + "x" * 200
    log.end(log.start(TRAIN), 2, reason)
    piped, narrow = io.StringIO(), io.StringIO()
    show_status(tmp_path, Console(file=piped, width=80), as_json=False)
    assert len(piped.getvalue().splitlines()) == 2 and piped.getvalue().splitlines()[1].endswith(reason)
    terminal = Console(file=narrow, width=80, force_terminal=True, color_system=None)
    show_status(directory.path, terminal, as_json=False)
    head, line, below = narrow.getvalue().split("\n", 2)
    assert len(head) <= 80 and len(line) <= 80 and line.endswith("…") and below.replace("\n", "").strip() == reason


def test_after_a_requeue_the_phase_is_that_of_the_present_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    log = AttemptLog(directory)
    with RunLock(directory):
        first = log.start(TRAIN)
        progress = ProgressReporter(directory, "train", 200)
        progress.phase("saving", step=7, role="verifier")
        assert run_state(directory, {}).detail == "verifier saving"
        log.end(first, 85, "SIGUSR2")
        assert run_state(directory, {}).state == "stopped"
        past = time.time() - 5
        os.utime(directory.progress, (past, past))
        log.start(TRAIN)
        state = run_state(directory, {})
        assert (state.state, state.detail, state.step) == ("running", "starting", 7)
        ProgressReporter(directory, "train", 200, first_step=7).phase("loading the generator")
        assert run_state(directory, {}).detail == "loading the generator"
        ProgressReporter(directory, "train", 200, first_step=7).phase("rollout", role="generator")
        directory.heartbeats.mkdir()
        write_beat(directory, Worker(0, "generator"), Beat(phase="rollout", part="35 of 160 responses"))
        assert run_state(directory, {}).detail == "generator rollout 35 of 160 responses"


def test_a_job_that_found_all_done_changes_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    paths = SimpleNamespace(stdout=tmp_path / "log")
    remember_job(directory, "sft,train", "slurm", SimpleNamespace(job_id="5", paths=paths), None)
    log = AttemptLog(directory)
    for stage in ("sft", "train"):
        attempt = log.start(STAGES[stage])
        attempt.job = "5"
        log.end(attempt, 0, "")
        update_summary(directory, stage, "done", steps=6)
    lines = directory.attempts_file.read_text().replace('"job": null', '"job": "5"')
    directory.attempts_file.write_text(lines)
    assert run_state(directory, {"5": ("COMPLETED", "")}).state == "done"
    remember_job(directory, "sft,train", "slurm", SimpleNamespace(job_id="6", paths=paths), None)
    assert run_state(directory, {"6": ("PENDING", "Priority")}).state == "waiting"
    assert run_state(directory, {"6": ("RUNNING", "")}).state == "running"
    for queue in ({"6": ("COMPLETED", "")}, {}):
        state = run_state(directory, queue)
        assert (state.state, state.detail, state.stage, state.attempts) == ("done", "", "train", 2)
    update_summary(directory, "train", "stopped", steps=3)
    assert run_state(directory, {"6": ("FAILED", "")}).state == "failed"


def test_watching_ends_when_all_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.control.mkdir(parents=True)
    directory.config.touch()
    log = AttemptLog(directory)
    attempt = log.start(TRAIN)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            log.end(attempt, 0, "")
            lock.release()

    lock = RunLock(directory).__enter__()
    monkeypatch.setattr(status_table.time, "sleep", pause)
    shown = io.StringIO()
    show_status(tmp_path, Console(file=shown, width=80, force_terminal=True), as_json=False, watch=True)
    assert pauses == [10, 10, 0] and "RUNNING" in shown.getvalue() and "COMPLETED" in shown.getvalue()
    done = CliRunner().invoke(app, ["status", str(tmp_path), "--watch", "--json"])
    assert isinstance(done.exception, UserError)


def test_logs_of_a_run_that_was_moved_have_those_of_its_supervisor(tmp_path: Path) -> None:
    directory = prepare_run([TRAIN], counting_config(tmp_path, "run", {"nodes": 1}), resume=False)
    log = directory.submitit_logs / "7_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("Continue with: tango go on\n")
    remember_job(directory, "train", "slurm", SimpleNamespace(job_id="7", paths=SimpleNamespace(stdout=log)), None)
    AttemptLog(directory).start(TRAIN)
    moved = directory.path.rename(tmp_path / "elsewhere")
    told = said(lambda console: show_logs(moved, console, rank=None, lines=5, follow=False))
    assert f"{moved}/logs/submitit/7_0_log.out" in told and "Continue with: tango go on" in told


ENDED = Attempt(number=1, stage="train", host="n1", job="7", started=1.0, saved_before=None, ended=2.0, code=85)
UNSTARTED = {"job": "8", "stages": "train", "cluster": "slurm", "submitted": 3.0}


@pytest.mark.parametrize(
    ("read", "state", "detail"),
    [
        ({}, "new", ""),
        ({"in_queue": ("PENDING", "Priority"), "unstarted": UNSTARTED}, "waiting", "Priority"),
        ({"in_queue": ("RUNNING", ""), "last": replace(ENDED, ended=None)}, "running", "rollout"),
        ({"in_queue": (slurm.UNKNOWN, "no answer"), "unstarted": UNSTARTED}, "unknown", "it had not started"),
        ({"in_queue": ("FAILED", ""), "unstarted": UNSTARTED}, "failed", "job 8 ended before the run started"),
        ({"last": ENDED}, "stopped", ""),
        ({"last": replace(ENDED, code=0)}, "done", ""),
        ({"last": replace(ENDED, code=1, reason="boom")}, "failed", "boom"),
        ({"last": replace(ENDED, ended=None, job=None), "held": True}, "running", "rollout"),
        ({"last": replace(ENDED, ended=None, job=None), "held": False}, "lost", "ended without a word"),
        ({"last": ENDED, "damaged": ["step_000004"]}, "stopped", "set aside as damaged: step_000004"),
    ],
)
def test_the_state_is_decided_from_what_was_read(read: dict[str, Any], state: str, detail: str) -> None:
    last = read.get("last")
    record: Any = SimpleNamespace(
        run="/runs/x",
        attempts=[last] if last is not None else [],
        last=last,
        unstarted=read.get("unstarted"),
        newest_job="8",
        last_stage="train",
        attempted_stage="train",
        progress={},
        in_queue=lambda job: read.get("in_queue", (None, "")),
        is_held=lambda: read["held"],
        status_of_ranks=lambda stage: "new",
        activity=lambda stage: "rollout",
        damaged=lambda stage: read.get("damaged", []),
    )
    found = state_of(record)
    assert found.state == state and detail in found.detail
