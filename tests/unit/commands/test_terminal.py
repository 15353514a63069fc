"""What a model says, and where an error repeats it, commands no terminal, whichever command shows it."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands import cli, status_table
from tango_hpc.commands.status import show_logs
from tango_hpc.commands.status_table import show_status
from tango_hpc.questions.grading import GradeItem, GradingPool
from tango_hpc.report.live_view import ProgressView
from tango_hpc.runner.attempts import AttemptLog
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.outcome import Outcome, write_outcome
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.supervisor import Supervisor
from tango_hpc.stages import job as stage_job
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.stage import TRAIN
from tests.helpers.runs import unseen
from tests.slurm.jobs import counting_config

EVIL = "\x1b]0;owned\x07 \x1b[2J \x9b31m \u202eabc"
SHOWN = "␛]0;owned␇ ␛[2J <U+009B>31m <U+202E>abc"
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COLOUR, PLAIN = "\x1b[1;36m", "\x1b[0m"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = prepare_run([TRAIN], counting_config(tmp_path, "run", {"nodes": 1}), resume=False)
    for folder in (made.logs, made.outcomes, made.heartbeats):
        folder.mkdir(exist_ok=True)
    return made


def shown_by(show: Callable[[Console], object], *, terminal: bool = False) -> str:
    """What it prints on a console without colours of its own."""
    output = io.StringIO()
    show(Console(file=output, width=400, force_terminal=terminal, color_system=None))
    return output.getvalue()


def test_an_own_tasks_error_that_repeats_an_answer(directory: RunDirectory, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        "class T:\n    def grade(self, question, answer):\n        raise ValueError('cannot read ' + answer)\n"
    )
    with GradingPool(1) as pool:
        called = {"file": str(task), "source": task.read_text(), "settings": {}, "question": {"question": "q"}}
        (verdict,) = pool.grade([GradeItem("own", "x", EVIL, called)])
    process = RankProcess(directory, Worker(0, "generator"), reads_file=False)

    def follow(console: Console) -> None:
        view = ProgressView(directory, console)
        journal = Journal(directory, "train", process, total_steps=9, resumed_step=0, writes=True, trackers=())
        journal.note(f"grading failed: {verdict.error}")
        view.refresh()

    text = shown_by(follow)
    assert f"cannot read {SHOWN}" in text and not COMMANDS.search(text)


def test_notes_of_a_run_on_the_display_and_in_the_log(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    process = RankProcess(directory, Worker(0, "generator"), reads_file=False)

    def follow(console: Console) -> None:
        view = ProgressView(directory, console)
        journal = Journal(directory, "train", process, total_steps=9, resumed_step=0, writes=True, trackers=())
        journal.note(EVIL)
        assert capsys.readouterr().out == f"{SHOWN}\n"
        directory.progress.write_text(directory.progress.read_text().replace("abc", r"abc \u001b]0;edited"))
        view.refresh()

    text = shown_by(follow)
    assert SHOWN in text and "␛]0;edited" in text and not COMMANDS.search(text)


@pytest.mark.parametrize("terminal", [True, False])
def test_status_of_a_run_that_ended_with_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    log = AttemptLog(directory)
    log.end(log.start(TRAIN), 1, f"rank 0 failed: ValueError: {EVIL}")
    text = shown_by(lambda console: show_status(directory.path, console, as_json=False), terminal=terminal)
    assert SHOWN in text and not COMMANDS.search(text)
    long = log.start(TRAIN)
    log.end(long, 1, f"{'long ' * 120}{EVIL}")  # which is cut, and told below
    text = shown_by(lambda console: show_status(directory.path, console, as_json=False), terminal=terminal)
    assert "…" in text and not COMMANDS.search(text)
    monkeypatch.setattr(status_table, "REFRESH_SECONDS", 0)
    text = shown_by(lambda console: show_status(directory.path, console, as_json=False, watch=True))
    assert "long" in text and not COMMANDS.search(text)


def test_logs_keep_their_colours_and_nothing_else(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    log, worker = AttemptLog(directory), Worker(0, "generator")
    log.end(log.start(TRAIN), 1, f"ValueError: {COLOUR}{EVIL}")
    write_outcome(directory, Outcome(0, "generator", error=EVIL, traceback=f"in grade\n{EVIL}"))
    file = directory.log_file(worker)
    file.write_text(f"{COLOUR}(engine){PLAIN} said {EVIL}\nleft on {COLOUR}\n", encoding="utf-8")

    def grow(_: float) -> None:
        file.write_text(f"{file.read_text(encoding='utf-8')}later {COLOUR}cyan{PLAIN} {EVIL}\n", encoding="utf-8")
        monkeypatch.setattr(time, "sleep", lambda _: log.end(log.start(TRAIN), 0, EVIL))

    text = shown_by(lambda console: show_logs(directory.path, console, rank=None, lines=3, follow=False))
    assert f"{COLOUR}(engine){PLAIN} said {SHOWN}\n" in text
    assert f"left on {COLOUR}{PLAIN}\n" in text, "what follows a log has no colour of it"
    assert f"ValueError: {COLOUR}{SHOWN}{PLAIN}\n" in text
    assert text.count(SHOWN) >= 3 and not COMMANDS.search(re.sub(r"\x1b\[[0-9;]*m", "", text))
    monkeypatch.setattr(time, "sleep", grow)
    log.start(TRAIN)
    monkeypatch.setattr("tango_hpc.commands.status.is_held", lambda _: True)
    text = shown_by(lambda console: show_logs(directory.path, console, rank=None, lines=0, follow=True))
    assert f"later {COLOUR}cyan{PLAIN} {SHOWN}\n" in text
    assert not COMMANDS.search(re.sub(r"\x1b\[[0-9;]*m", "", text))


class Dead:
    """A starter of a rank that ends at once, with a model's text for a last word."""

    def start(self) -> None:
        """Nothing starts."""

    def running(self) -> bool:
        """Whether it runs: it has ended."""
        return False

    def deaths(self) -> list[Outcome]:
        """How it ended."""
        return [Outcome(0, error=EVIL, traceback=EVIL)]

    def kill(self) -> None:
        """Nothing is left."""


def test_the_supervisor_of_a_run_that_failed_with_it(tmp_path: Path, directory: RunDirectory) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    text = shown_by(lambda console: Supervisor(directory, config, ["generator"], Dead(), console, unseen).run())
    assert text.count(SHOWN) == 2 and not COMMANDS.search(text)


def test_the_error_that_ends_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise CheckFailed(f"no such answer: {EVIL}")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    monkeypatch.setattr(RunDirectory, "open", fail)
    monkeypatch.setattr("sys.argv", ["job", "run", "train"])
    assert stage_job.main() == CheckFailed.exit_code
    assert capsys.readouterr().err == f"tango: no such answer: {SHOWN}\n" * 2
