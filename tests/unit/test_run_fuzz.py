"""Whatever becomes of the files that only show things: a run is looked at and goes on, or says what it lacks."""

from __future__ import annotations

import io
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from tango_hpc.control.heartbeat import Beat, write_beat
from tango_hpc.control.outcome import Outcome, write_outcome
from tango_hpc.launch import lock as locking
from tango_hpc.launch.attempts import AttemptLog
from tango_hpc.launch.continuity import compare_with_last
from tango_hpc.launch.enter import prepare_run
from tango_hpc.launch.lock import Holder
from tango_hpc.launch.provenance import record_attempt
from tango_hpc.manage.status import show_logs
from tango_hpc.manage.status_table import show_status
from tango_hpc.report import run_page
from tango_hpc.report.progress import ProgressView
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.metrics import MetricsWriter
from tango_hpc.run.progress import ProgressReporter
from tango_hpc.run.summary import update_summary
from tango_hpc.run.worker import Worker
from tests.slurm.jobs import counting_config

CASES = 40
OTHER_VALUES = (b"null", b"5", b'"x"', b"[]", b"{}", b"-1", b"1e400", b"true")


def flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content))
    return content[:start] + content[start + chance.randrange(len(content)) :]


def retyped(content: bytes, chance: random.Random) -> bytes:
    """One value becomes another: still JSON."""
    values = list(re.finditer(rb': ("[^"]*"|[\d.]+|null|true|false)', content))
    value = chance.choice(values)
    return content[: value.start(1)] + chance.choice(OTHER_VALUES) + content[value.end(1) :]


def replaced(content: bytes, chance: random.Random) -> bytes:
    return chance.choice((b"", b"[]", b"{}", b"null\n", b"5\n", b'"x"\n', b"[1]\n", b"\xff\n", b"{}\n{}\n"))


def test_a_run_with_damaged_files_is_looked_at_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(run_page, "drawings", lambda *_: [])
    monkeypatch.setattr(run_page, "save_curves", lambda *_: None)
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run(["train"], config, resume=False)

    def attempt() -> None:
        log = AttemptLog(directory)
        entry, _ = compare_with_last(directory, "train", config)
        record_attempt(directory, stage="train", computes_with=entry)
        log.end(log.start("train"), 1, "boom")
        update_summary(directory, "train", "running", begins=True, results={"generator.accuracy_before": 0.1})

    def look() -> None:
        show_status(directory.path, Console(file=io.StringIO()), as_json=False)
        show_logs(directory.path, Console(file=io.StringIO()), rank=None, lines=2, follow=False)
        run_page.write_report(directory)
        view = ProgressView(directory, Console(file=io.StringIO(), force_terminal=True))
        view.refresh()
        Console(file=io.StringIO()).print(view.render())

    attempt()
    ProgressReporter(directory, "train", 10)
    with MetricsWriter(directory, "train") as metrics:
        metrics.write_evaluation(0, {"generator/accuracy": 0.1})
        for step in (1, 2, 3):
            metrics.write({"step": step, "role": "generator", "loss": 0.5, "seconds/total": 1.0, "data/too_long": 1})
        metrics.write_event("checkpoint_set_aside", 2, "it was damaged")
    write_beat(directory, Worker(0, "generator"), Beat(host="a", pid=1))
    write_outcome(directory, Outcome(0, "generator", "ValueError", host="a"))
    job = {"job": "5", "stages": "train", "cluster": "slurm", "profile": None, "submitted": 1.0, "log": "none"}
    directory.jobs_file.write_text(json.dumps([job]))
    directory.lock_file.write_text(json.dumps(asdict(Holder(host="a", pid=4, start=5, boot="b", id="i"))))
    contents = {file: file.read_bytes() for file in files_that_show(directory)}
    assert len(contents) == 10
    chance = random.Random(7)
    damages: tuple[Callable[[bytes, random.Random], bytes], ...] = (flipped, cut, retyped, retyped, replaced)
    for number in range(CASES):
        for file, content in contents.items():
            file.write_bytes(content)
        file = list(contents)[number % len(contents)]
        damage = damages[number % len(damages)]
        file.write_bytes(damage(contents[file], chance))
        os.utime(directory.lock_file, (1, 1))
        try:
            look()
            prepare_run(["train"], config, resume=True)
            with MetricsWriter(directory, "train", resumed_step=2):
                attempt()
            look()
        except Exception as error:
            raise AssertionError(f"{damage.__name__} {file.name}: {file.read_bytes()[:500]!r}") from error


def files_that_show(directory: RunDirectory) -> list[Path]:
    """All that a run can do without."""
    named = [directory.summary, directory.provenance, directory.progress, directory.metrics, directory.evaluations]
    named += [directory.attempts_file, directory.jobs_file, directory.lock_file]
    return [*named, *directory.heartbeats.iterdir(), *directory.outcomes.iterdir()]
