"""The record that one process writes of a stage; in the other processes every call only beats the heart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tango_hpc.base.errors import StoppedEarly
from tango_hpc.base.formats import visible
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsRow, MetricsWriter
from tango_hpc.base.run.progress import ProgressReporter
from tango_hpc.base.run.summary import Status, update_summary
from tango_hpc.base.types import TrackerName
from tango_hpc.runner.process import RankProcess


class Journal:
    """Metrics, progress, heartbeat phase and summary of one attempt at a stage."""

    def __init__(
        self,
        directory: RunDirectory,
        stage: str,
        process: RankProcess,
        total_steps: int,
        resumed_step: int,
        *,
        writes: bool,
        trackers: Sequence[TrackerName],
    ) -> None:
        self._directory, self._stage, self._process = directory, stage, process
        self._trackers = trackers
        self._started = time.monotonic()
        self._step = resumed_step
        self._writes = writes
        if self._writes:
            self._progress = ProgressReporter(directory, stage, total_steps, resumed_step)
            self._metrics = self._open_metrics(resumed_step)
            update_summary(directory, stage, "running", begins=True, steps=resumed_step)

    def phase(self, name: str, *, role: str | None = None) -> None:
        """Announce the phase to the watchdog (every process) and to the display."""
        self._process.heart.enter(name)
        if self._writes:
            self._progress.phase(name, step=self._step, role=role)

    def begin(self, phase: str, *, stopped: str) -> None:
        """Enter `phase` after a safe point. Raises `StoppedEarly`, which says `stopped`, where the run was asked
        to stop.
        """
        if self._process.check(phase):
            self.ended("stopped")
            raise StoppedEarly(stopped)
        self.phase(phase)

    def note(self, text: str) -> None:
        """Print a notice once, in the log and on the display."""
        if self._writes:
            text = visible(text)  # an own task's error may repeat what a model said
            print(text, flush=True)
            self._progress.note(text)

    def checkpoints_set_aside(self, messages: Iterable[str]) -> None:
        """Say which checkpoints were found damaged, in the log, on the display and for good in metrics.jsonl."""
        for text in messages:
            self.note(text)
            if self._writes:
                self._metrics.write_event("checkpoint_set_aside", self._step, text)

    def troubled(self, begun: Iterable[str], lasting: Iterable[str]) -> None:
        """Say which troubles began with the last step, in the log and for good in metrics.jsonl; and which last now."""
        if self._writes:
            self._progress.troubles(list(lasting))
        for text in begun:
            self.note(text)
            if self._writes:
                self._metrics.write_event("trouble", self._step, text)

    def went_back(self, step: int, text: str) -> None:
        """Go on as after `step`: later rows are dropped, as when a run is resumed."""
        self._step = step
        if self._writes:
            self._metrics.close()
            self._metrics = self._open_metrics(step)
            self._metrics.write_event("rollback", step, text)
            self._progress.troubles([])
        self.note(text)

    def step_done(self, row: MetricsRow) -> None:
        """Write the metrics of optimizer step `row["step"]`."""
        self._step = row["step"]
        if self._writes:
            self._metrics.write({**row, "time": time.time()})

    def part_done(self) -> None:
        """Count one of the parts of a stage without optimizer steps."""
        self._step += 1
        if self._writes:
            self._progress.phase("between parts", step=self._step)

    def evaluated(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Write an evaluation on held-out data after optimizer step `step`."""
        if self._writes:
            self._metrics.write_evaluation(step, values)

    def results(self, values: Mapping[str, float | None]) -> None:
        """Put dotted results such as `generator.accuracy_before` into the summary."""
        if self._writes:
            update_summary(self._directory, self._stage, "running", steps=self._step, results=values)

    def ended(self, status: Status, tokens_per_second: float | None = None) -> None:
        """Write how the attempt ended and close the files."""
        if self._writes:
            self._metrics.close()
            update_summary(
                self._directory,
                self._stage,
                status,
                steps=self._step,
                attempt_seconds=time.monotonic() - self._started,
                tokens_per_second=tokens_per_second,
            )

    def _open_metrics(self, resumed_step: int) -> MetricsWriter:
        opened = MetricsWriter(
            self._directory, self._stage, resumed_step=resumed_step, trackers=self._trackers, tell=self.note
        )
        for gap in opened.gaps:
            self.note(gap)
        return opened


class Clock:
    """Seconds by phase of one optimizer step. A phase inside another stops the outer one's time meanwhile."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`."""
        self._settle()
        self._open.append(phase)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def so_far(self) -> dict[str, float]:
        """Return seconds of every phase up to now."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        """Give the time since the last look to the innermost phase."""
        now = time.perf_counter()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
