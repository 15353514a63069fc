"""The progress display: driven by the files of a run directory alone, on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tango_hpc.base.formats import clock, sparkline
from tango_hpc.base.run.metrics import MetricsWriter
from tango_hpc.base.run.progress import ProgressReporter
from tango_hpc.base.run.summary import update_summary
from tango_hpc.base.run.worker import Worker
from tango_hpc.report.live_view import ProgressView
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.heartbeat import Beat, write_beat


@pytest.fixture
def directory(tmp_path):
    return enter_run(tmp_path / "a run", "seed: 0\n", resume=False)[0]


def row(step, **values):
    return {"step": step, "role": "generator", "seconds/total": 2.0, "seconds/rollout": 1.5, **values}


def log_view(directory):
    output = io.StringIO()
    return ProgressView(directory, Console(file=output, width=200)), output


def test_log_gets_one_line_per_step_with_rate_and_time_left(directory):
    view, output = log_view(directory)
    ProgressReporter(directory, "train", total_steps=31)
    with MetricsWriter(directory, "train") as metrics, view:
        metrics.write(row(1, **{"tokens/generated": 5000, "generator/accuracy": 0.5, "loss": 0.25}))
        view.refresh()
        metrics.write_evaluation(1, {"generator/accuracy": 0.625})
        view.refresh()
        view.refresh()
    assert output.getvalue().splitlines() == [
        "[train] starting",
        "[train] step 1/31 generator  accuracy 0.500  loss 0.2500  2,500 tokens/s  2.0 s (rollout 1.5)  ETA 0:01:00",
        "[train] held out, after step 1: generator/accuracy 0.625",
    ]


def test_rows_of_earlier_attempts_are_no_news(directory):
    with MetricsWriter(directory, "train") as metrics:
        for step in (1, 2, 3):
            metrics.write(row(step))
    view, output = log_view(directory)
    ProgressReporter(directory, "train", total_steps=5, first_step=2)
    with MetricsWriter(directory, "train", resumed_step=2) as metrics:
        view.refresh()
        metrics.write(row(3))
        view.refresh()
    assert [line[:16] for line in output.getvalue().splitlines()] == ["[train] starting", "[train] step 3/5"]
    assert [one["step"] for one in view.rows] == [1, 2, 3]


def test_what_the_attempt_before_said_is_no_news(directory):
    earlier = ProgressReporter(directory, "train", total_steps=5)
    earlier.note("the verifier says the same to all")
    earlier.phase("saving", step=4)
    view, output = log_view(directory)
    view.refresh()
    assert output.getvalue() == "" and view.state == {}
    ProgressReporter(directory, "train", total_steps=5, first_step=2).note("the verifier says the same to all")
    view.refresh()
    assert output.getvalue().splitlines() == ["Note: the verifier says the same to all", "[train] starting"]


def test_terminal_shows_both_models_before_and_now(directory):
    view, output = log_view(directory)
    reporter = ProgressReporter(directory, "train", total_steps=4)
    with MetricsWriter(directory, "train") as metrics:
        metrics.write_evaluation(0, {"generator/accuracy": 0.125, "verifier/outcome_f1": 0.5})
        for step in (1, 2):
            metrics.write(row(step, **{"generator/accuracy": 0.25 * step, "verifier/outcome_f1": 0.75}))
        metrics.write_evaluation(2, {"generator/accuracy": 0.5, "verifier/outcome_f1": 0.8})
    reporter.phase("rollout", step=2, role="verifier")
    view.refresh()
    Console(file=output, width=140).print(view.render())
    shown = output.getvalue()
    assert "2/4" in shown and "ETA 0:00:04" in shown and "verifier: rollout" in shown
    accuracy = next(line for line in shown.splitlines() if "generator accuracy" in line)
    assert accuracy.split()[2:] == ["50.0%", "50.0%", "12.5%", "▁█"]


def test_how_far_a_long_phase_has_come_is_shown(directory):
    view, output = log_view(directory)
    ProgressReporter(directory, "train", total_steps=4).phase("verify", step=2, role="generator")
    write_beat(directory, Worker(0, "generator"), Beat(phase="verify"))
    write_beat(directory, Worker(0, "verifier"), Beat(phase="verify", part="35 of 160 responses"))
    view.refresh()
    Console(file=output, width=140).print(view.render())
    assert re.search(r"generator: verify … \d+ s, 35 of 160 responses", output.getvalue())
    ProgressReporter(directory, "train", total_steps=4).phase("train", step=2)
    view.refresh()
    Console(file=output, width=140).print(view.render())
    assert "responses" not in output.getvalue().split("160 responses")[1]


def test_live_display_starts_before_the_run_has_written_anything(directory):
    output = io.StringIO()
    with ProgressView(directory, Console(file=output, width=100, force_terminal=True)) as view:
        view.refresh()
    assert "starting" in output.getvalue()


def test_end_shows_the_table_and_the_report(directory):
    view, output = log_view(directory)
    update_summary(
        directory, "train", "done", results={"generator.accuracy_before": 0.12, "generator.accuracy_after": 0.77}
    )
    with MetricsWriter(directory, "train") as metrics:
        metrics.write(row(1, **{"generator/accuracy": 0.5}))
    view.finish()
    assert "Generator accuracy" in directory.report.read_text()
    shown = output.getvalue()
    assert "12.0" in shown and "77.0" in shown and "+65.0" in shown
    assert f"Report: {directory.report}" in shown


def test_small_formats():
    assert clock(3725.4) == "1:02:05"
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([2.0, 2.0, 2.0], 10) == "▁▁▁"
    assert sparkline([1.0], 10) == ""
    assert len(sparkline([float(value) for value in range(1000)], 30)) <= 30
