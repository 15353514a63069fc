"""The live display of a run, from another process.

It needs the run directory only (progress.json, metrics.jsonl, evaluations.jsonl, summary.json, rank 0's heartbeats), so
the same display serves the foreground command, a job on another machine and a run that has ended. On a terminal it is
live; elsewhere (a Slurm log, a pipe) it prints one plain line per optimizer step.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tango_hpc.base.files import is_of_disk
from tango_hpc.base.formats import clock, say, sparkline
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import PHASES, MetricsRow, RowTail
from tango_hpc.base.run.progress import read_progress
from tango_hpc.base.run.summary import before_and_after, read_summary
from tango_hpc.runner.heartbeat import part_under_way

STEPS_OF_ETA = 20  # optimizer steps whose mean time the estimate rests on

LINE_FIELDS = (
    ("accuracy", "generator/accuracy", ".3f"),
    ("F1", "verifier/outcome_f1", ".3f"),
    ("reward", "verifier/reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("gap", "logprob_gap/mean_abs", ".1e"),
)

DISPLAY_FIELDS = (
    ("generator accuracy", "generator/accuracy", ".1%"),
    ("verifier outcome F1", "verifier/outcome_f1", ".3f"),
    ("verifier step F1", "verifier/step_f1", ".3f"),
    ("verifier reward", "verifier/reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("generator loss", "generator/eval_loss", ".4f"),
    ("verifier loss", "verifier/eval_loss", ".4f"),
    ("log-probability gap", "logprob_gap/mean_abs", ".1e"),
)


class ProgressView:
    """The viewer's side. Call `refresh` about twice a second while the run lives, and `finish` when it has ended.

    Use it as a context manager: leaving it, by Ctrl-C too, gives the terminal back.
    """

    def __init__(self, directory: RunDirectory, console: Console | None = None) -> None:
        self._directory = directory
        self._console = console or Console()
        self._metrics, self._evaluations = RowTail(directory.metrics), RowTail(directory.evaluations)
        self.rows: list[MetricsRow] = []
        self.evaluations: list[MetricsRow] = []
        self.state: dict[str, Any] = {}
        self._part = ""  # of the phase
        self._last_phase: tuple[Any, ...] = ()
        self._notes_shown: list[str] = []
        # What earlier attempts and stages wrote is history, not news.
        self._earlier = read_progress(directory).get("attempt_started")
        self._collect()
        self._live: Live | None = None

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self.render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def refresh(self) -> None:
        """Read what is new and show it."""
        rows, evaluations = self._collect()
        for note in self.state.get("notes", []):
            if note not in self._notes_shown:
                self._notes_shown.append(note)
                self._print(f"Note: {note}")
        if self._live is not None:
            return  # Live draws by itself
        phase = (self.state.get("stage"), self.state.get("phase"))
        if phase != self._last_phase and phase[1] not in PHASES and phase[1] is not None:
            self._print(f"[{phase[0]}] {phase[1]}")
        self._last_phase = phase
        for row in rows:
            self._print(self.row_line(row))
        for row in evaluations:
            self._print(evaluation_line(row))

    def finish(self) -> None:
        """Write the report and show where it is, after the table of before and after."""
        from tango_hpc.report.run_page import write_report  # loads matplotlib, which nothing before needs

        self.refresh()
        self.__exit__()
        if self.rows or self.evaluations:
            try:
                write_report(self._directory)
            except Exception as error:  # a page about the run must not decide how it ended, which is still to be told
                self._print(f"report.html was not written: {type(error).__name__}: {error}")
                if not is_of_disk(error):
                    traceback.print_exc()
        rows = before_and_after(read_summary(self._directory))
        if rows:
            self._console.print(before_after_table(rows))
        if self._directory.report.is_file():
            self._console.print(f"Report: {self._directory.report}", soft_wrap=True, highlight=False)

    def _print(self, line: str) -> None:
        say(self._console, line)

    def _collect(self) -> tuple[list[MetricsRow], list[MetricsRow]]:
        """Take in the new rows; returns those that are news (a rewritten file after a resume is none)."""
        rows, rewritten = self._metrics.new_rows()
        rows = [row for row in rows if "event" not in row]  # these come as notes
        self.rows = rows if rewritten else self.rows + rows
        evaluations, evaluations_rewritten = self._evaluations.new_rows()
        self.evaluations = evaluations if evaluations_rewritten else self.evaluations + evaluations
        state = read_progress(self._directory)
        if state and state.get("attempt_started") != self._earlier:
            self.state = state
        self._part = part_under_way(self._directory, self.state["phase"]) if self.state else ""
        return ([] if rewritten else rows), ([] if evaluations_rewritten else evaluations)

    # -- what is shown -------------------------------------------------------------------------------------

    def _of_stage(self, rows: Sequence[MetricsRow]) -> list[MetricsRow]:
        return [row for row in rows if row.get("stage") == self.state.get("stage")]

    def eta_seconds(self, step: int) -> float | None:
        """Return time left after `step` at the pace of the last steps; None before the first one."""
        recent = [row["seconds/total"] for row in self._of_stage(self.rows)[-STEPS_OF_ETA:] if row.get("seconds/total")]
        total = self.state.get("total_steps")
        if not recent or total is None:
            return None
        return statistics.fmean(recent) * max(total - step, 0)

    def row_line(self, row: MetricsRow) -> str:
        """Return one optimizer step as a plain line."""
        total = self.state.get("total_steps", "?")
        parts = [f"[{row.get('stage')}] step {row['step']}/{total} {row['role']:<9}"]
        for label, key, form in LINE_FIELDS:
            if row.get(key) is not None:
                parts.append(f"{label} {row[key]:{form}}")
        rate = tokens_per_second(row)
        if rate is not None:
            parts.append(f"{rate:,.0f} tokens/s")
        if row.get("seconds/total") is not None:
            phases = " ".join(f"{name} {row[f'seconds/{name}']:.1f}" for name in PHASES if row.get(f"seconds/{name}"))
            parts.append(f"{row['seconds/total']:.1f} s" + (f" ({phases})" if phases else ""))
        left = self.eta_seconds(row["step"])
        if left is not None:
            parts.append(f"ETA {clock(left)}")
        return "  ".join(parts)

    def render(self) -> RenderableType:
        """Return the live display."""
        state, now = self.state, time.time()
        if not state:
            return Text("starting …", style="dim")
        rows, evaluations = self._of_stage(self.rows), self._of_stage(self.evaluations)
        step, total = state["step"], state["total_steps"]
        head = Table.grid(padding=(0, 2))
        left = self.eta_seconds(step)
        head.add_row(
            Text(f"{state['stage']}", style="bold"),
            ProgressBar(total=max(total, 1), completed=step, width=32),
            Text(f"{step}/{total}"),
            Text(f"{clock(now - state['attempt_started'])} elapsed", style="dim"),
            Text(f"ETA {clock(left)}" if left is not None else "", style="dim"),
        )
        doing = f"{state['role']}: " if state.get("role") and state["phase"] in PHASES else ""
        since = f"{now - state['phase_started']:.0f} s" + (f", {self._part}" if self._part else "")
        phase = Text(f"{doing}{state['phase']} … {since}", style="cyan")
        body = Table(box=None, padding=(0, 2), show_edge=False)
        for title in ("", "this step", "held out", "before", "trend"):
            body.add_column(title, justify="left" if title in ("", "trend") else "right", header_style="dim")
        for title, key, form in DISPLAY_FIELDS:
            values = [row[key] for row in rows if row.get(key) is not None]
            held_out = [(row["step"], row[key]) for row in evaluations if row.get(key) is not None]
            if not values and not held_out:
                continue
            before = [value for at, value in held_out if at == 0]
            body.add_row(
                title,
                f"{values[-1]:{form}}" if values else "",
                Text(f"{held_out[-1][1]:{form}}", style="bold green") if held_out else "",
                f"{before[0]:{form}}" if before else "",
                sparkline(values, width=30),
            )
        return Group(head, phase, body, self._pace(rows))

    def _pace(self, rows: Sequence[MetricsRow]) -> Text:
        recent = rows[-STEPS_OF_ETA:]
        text = Text()
        rates = [rate for rate in map(tokens_per_second, recent) if rate is not None]
        if rates:
            text.append(f"{statistics.fmean(rates):,.0f} tokens/s   ", style="bold")
        seconds = {
            name: statistics.fmean(row[f"seconds/{name}"] or 0.0 for row in recent)
            for name in PHASES
            if any(row.get(f"seconds/{name}") for row in recent)
        }
        if seconds:
            text.append("seconds a step: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()))
        return text


def evaluation_line(row: MetricsRow) -> str:
    """Return one evaluation as a plain line."""
    shown = [f"{key} {value:.4g}" for key, value in row.items() if key != "step" and isinstance(value, int | float)]
    return f"[{row.get('stage')}] held out, after step {row['step']}: " + "  ".join(shown)


def tokens_per_second(row: MetricsRow) -> float | None:
    """Return tokens that were generated, or trained on where none were, per second of the step."""
    tokens, seconds = row.get("tokens/generated") or row.get("tokens/trained"), row.get("seconds/total")
    return tokens / seconds if tokens and seconds else None


def before_after_table(rows: Sequence[tuple[str, float | None, float | None]]) -> Table:
    """Return the table of before and after, for a terminal."""
    table = Table(title="On held-out questions", title_justify="left")
    for title, justify in (("", "left"), ("before", "right"), ("after", "right"), ("change", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for title, before, after in rows:
        change = "" if before is None or after is None else f"{100 * (after - before):+.1f}"
        table.add_row(title, *("" if value is None else f"{100 * value:.1f}" for value in (before, after)), change)
    return table
