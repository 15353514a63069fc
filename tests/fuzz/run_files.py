"""A run with one damaged file, of those that it can do without: looked at, and gone on with."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsWriter, read_events, read_metrics
from tango_hpc.base.run.progress import ProgressReporter
from tango_hpc.base.run.summary import update_summary
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.ending import cancel
from tango_hpc.commands.status import show_logs
from tango_hpc.commands.status_table import show_status
from tango_hpc.report import run_page
from tango_hpc.report.live_view import ProgressView
from tango_hpc.runner import lock as locking
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.continuity import compare_with_last
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.heartbeat import Beat, write_beat
from tango_hpc.runner.lock import Holder, Process
from tango_hpc.runner.outcome import Outcome, write_outcome
from tango_hpc.runner.provenance import record_attempt
from tango_hpc.stages.stage import TRAIN
from tests.fuzz.choices import Choices
from tests.slurm.jobs import counting_config


@cache
def a_run(folder: Path) -> tuple[Config, RunDirectory, dict[Path, bytes]]:
    """A run that has done two steps of another stage, then four and lost the last one's row, and the contents of its
    files that only show or count things.
    """
    config = counting_config(folder, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    attempt(config, directory)
    ProgressReporter(directory, "train", 10)
    with MetricsWriter(directory, "sft", trackers=()) as metrics:
        for step in (1, 2):
            metrics.write({"step": step, "role": "generator", "loss": 0.5})
    (directory.checkpoints / "sft" / "step_000002").mkdir(parents=True)
    with MetricsWriter(directory, "train") as metrics:
        metrics.write_evaluation(0, {"generator/accuracy": 0.1})
        for step in (1, 2, 3):
            metrics.write({"step": step, "role": "generator", "loss": 0.5, "seconds/total": 1.0, "data/too_long": 1})
        metrics.write_event("checkpoint_set_aside", 2, "it was damaged")
        metrics.write_event("rows_lost", 4, "lost", first_step=4, last_step=4)
    write_beat(directory, Worker(0, "generator"), Beat(host="a", pid=1))
    write_outcome(directory, Outcome(0, "generator", "ValueError", host="a"))
    job = {"job": "5", "stages": "train", "cluster": "slurm", "profile": None, "submitted": 1.0, "log": "none"}
    local = job | {"job": "4", "cluster": "local", "process": asdict(Process("a", "b", pid=4, start=5))}
    directory.jobs_file.write_text(json.dumps([job, local]))
    directory.lock_file.write_text(json.dumps(asdict(Holder(host="a", pid=4, start=5, boot="b", id="i"))))
    named = [directory.summary, directory.provenance, directory.progress, directory.metrics, directory.evaluations]
    named += [directory.attempts_file, directory.jobs_file, directory.lock_file, directory.config]
    files = [*named, *directory.heartbeats.iterdir(), *directory.outcomes.iterdir()]
    assert len(files) == 11
    return config, directory, {file: file.read_bytes() for file in files}


def attempt(config: Config, directory: RunDirectory) -> None:
    """What an attempt writes before and after its ranks."""
    log = AttemptLog(directory)
    entry, _ = compare_with_last(directory, TRAIN, config)
    record_attempt(directory, stage="train", computes_with=entry)
    log.end(log.start(TRAIN), 1, "boom")
    update_summary(directory, "train", "running", begins=True, results={"generator.accuracy_before": 0.1})


def look(directory: RunDirectory) -> None:
    """Status, logs, report, progress."""
    show_status(directory.path, Console(file=io.StringIO()), as_json=False)
    show_logs(directory.path, Console(file=io.StringIO()), rank=None, lines=2, follow=False)
    run_page.write_report(directory)
    written = directory.progress.read_bytes() if directory.progress.is_file() else None
    directory.progress.unlink(missing_ok=True)
    view = ProgressView(directory, Console(file=io.StringIO(), force_terminal=True))
    if written is not None:
        directory.progress.write_bytes(written)  # by the attempt that is shown
    view.refresh()
    Console(file=io.StringIO()).print(view.render())


def damage_one(folder: Path, data: bytes) -> str:
    """Goes on with one file damaged as `data` say; its name where the run could only say in words what it lacks."""
    _, _, contents = a_run(folder)
    choices = Choices(data)
    file = choices.pick(sorted(contents))
    return go_on_with(folder, file, choices.changed_bytes(contents[file]))


def go_on_with(folder: Path, file: Path, damaged: bytes) -> str:
    """Looks at the run and resumes it with other contents of `file`; its name where that was refused, as of
    config.yaml.

    Without drawings, and without waiting to see whether the holder of a lock lives: hundreds of these are asked for.
    """
    with (
        patch.object(locking, "WATCH_SECONDS", 0.0),
        patch.multiple(run_page, drawings=lambda *_: [], save_curves=lambda *_: None),
    ):
        return _go_on_with(folder, file, damaged)


def _go_on_with(folder: Path, file: Path, damaged: bytes) -> str:
    config, directory, contents = a_run(folder)
    for other, content in contents.items():
        other.write_bytes(content)
    file.write_bytes(damaged)
    os.utime(directory.lock_file, (1, 1))
    try:
        look(directory)
        with patch.object(slurm, "is_available", lambda: False):
            cancel(directory.path, Console(file=io.StringIO()))  # no process of this boot stands in any file
        prepare_run([TRAIN], config, resume=True)
        with MetricsWriter(directory, "train", resumed_step=4):
            attempt(config, directory)
        look(directory)
    except UserError as error:
        silent = file == directory.lock_file and "Slurm did not answer" in str(error)  # of a job that it may name
        assert (file == directory.config and str(error).strip()) or silent, f"{file.name}: {error}"
        return file.name
    except Exception as error:
        raise AssertionError(f"{file.name}: {file.read_bytes()[:500]!r}") from error
    for stage, done in (("sft", 2), ("train", 4)):
        steps = [row["step"] for row in read_metrics(directory, stage)]
        marked = [
            step
            for event in read_events(directory, stage)
            if event["event"] == "rows_lost"
            for step in range(max(event["first_step"], 1), min(event["last_step"], done) + 1)
        ]
        assert {*range(1, done + 1)} <= {*steps, *marked}, f"rows were dropped without a word: {steps} {marked}"
    return ""
