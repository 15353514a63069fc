"""`tango status`: one line a run, in the words of Slurm's own commands, however narrow the terminal."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tango_hpc.base.formats import visible
from tango_hpc.commands.status import RunState, find_runs, states
from tango_hpc.runner import slurm

REFRESH_SECONDS = 10.0  # a controller serves everybody
CAUSE_LINES = (
    5  # of what ended a run: a failure may list hundreds of tensors, or be one line of thousands of characters
)
LONGEST_DETAIL = 400  # characters, where no terminal sets a width
TITLES = ("RUN", "STAGE", "STATE", "STEP", "TRIES", "JOB", "DETAIL")
# Slurm's names of states, as far as Slurm has one: a run that was never started has none, for example.
SLURMS_NAMES = {"waiting": "PENDING", "done": "COMPLETED"}
COLOURS = {
    "done": "green",
    "running": "cyan",
    "failed": "red",
    "lost": "red",
    "waiting": "yellow",
    "stopped": "yellow",
}


def show_status(path: Path, console: Console, *, as_json: bool, watch: bool = False) -> None:
    """Print a line for the run or each run below a folder (named from there), or a list of JSON objects.

    `watch` repeats this until all are over or the user presses Ctrl-C.
    """
    if as_json:
        print(json.dumps([asdict(state) for state in states(find_runs(path))], indent=2))
    elif not watch:
        console.print(_page(path, console), soft_wrap=True)
    else:
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            over = False
            while not over:
                found = states(find_runs(path))
                live.update(_page(path, console, found), refresh=True)
                over = all(state.is_over for state in found)
                time.sleep(0 if over else REFRESH_SECONDS)


def _page(path: Path, console: Console, found: Sequence[RunState] | None = None) -> Text:
    """Return the lines, cut to the width of a terminal; what goes into a file or a pipe is not cut."""
    width = console.width if console.is_terminal or found is not None else None  # what is watched is a screen
    found = states(find_runs(path)) if found is None else found
    lines, cut = table(path, found, width)
    if cut and len(found) == 1:
        lines += map(Text, _cause(found[0], console.width))
    elif cut:
        lines.append(Text("…: `tango status RUN` shows all of it", style="dim"))
    return Text("\n").join(lines)


def _cause(state: RunState, width: int) -> list[str]:
    """Return why a run is where it is, in at most `CAUSE_LINES` lines of `width` characters."""
    told = visible(state.detail).splitlines()
    lines = [part for line in told for part in textwrap.wrap(line, max(width, 20))]
    if len(lines) > CAUSE_LINES:
        lines = [*lines[: CAUSE_LINES - 1], f"… the rest: tango logs {shlex.quote(state.run)}"]
    return lines


def table(path: Path, found: Sequence[RunState], width: int | None) -> tuple[list[Text], bool]:
    """Return a line of titles and one of each run, none longer than `width`; whether a detail had to be cut."""
    rows = [_cells(path, state) for state in found]
    widths = [max(len(row[column]) for row in (TITLES, *rows)) for column in range(len(TITLES))]
    if width is not None:
        left = max(width - sum(widths[1:-1]) - len(widths) + 1, 12)  # for names and details
        widths[0] = min(widths[0], max(left - widths[-1], left * 6 // 10))
        widths[-1] = left - widths[0]
    cut = width is not None and any(len(row[-1]) > widths[-1] for row in rows)
    lines = []
    for row, colour in zip((TITLES, *rows), ("bold", *(COLOURS.get(state.state, "") for state in found)), strict=True):
        name = row[0] if len(row[0]) <= widths[0] else f"…{row[0][1 - widths[0] :]}"  # names differ at their ends
        detail = row[-1] if len(row[-1]) <= widths[-1] else f"{row[-1][: widths[-1] - 1]}…"
        words = [*(word.ljust(size) for word, size in zip((name, *row[1:-1]), widths, strict=False)), detail]
        line = Text(" ".join(words).rstrip())
        start = widths[0] + widths[1] + 2
        line.stylize(colour, *(() if row is TITLES else (start, start + widths[2])))
        lines.append(line)
    return lines, cut


def _cells(path: Path, state: RunState) -> tuple[str, ...]:
    run, top = Path(state.run), path.absolute()
    name = state.run if run == top else str(run.relative_to(top))
    in_queue = state.job_state if state.state in ("waiting", "running") and slurm.is_alive(state.job_state) else None
    shown = in_queue or SLURMS_NAMES.get(state.state, state.state.upper())
    steps = "" if state.step is None else f"{state.step}/{state.total_steps}"
    detail = visible(" ".join(state.detail.split()))
    if len(detail) > LONGEST_DETAIL:
        detail = f"{detail[:LONGEST_DETAIL]}… (`tango logs` shows all of it)"
    return name, state.stage, shown, steps, str(state.attempts), state.job or "", detail
