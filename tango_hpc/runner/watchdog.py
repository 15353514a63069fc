"""The watchdog, which finds processes that hang from their heartbeats."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.heartbeat import Beat, read_beat
from tango_hpc.runner.outcome import Outcome


@dataclass
class Watchdog:
    """Finds a hang: a process has not advanced for `timeout_seconds`, or its heartbeat has stopped for that long.

    Who stands in a collective does not hang while another process advances. Until its first safe point a process
    imports libraries and loads models: then `loading_seconds` is the limit. Only the order of changes that this process
    sees counts, never the clocks of other nodes.
    """

    directory: RunDirectory
    workers: Sequence[Worker]
    timeout_seconds: float
    loading_seconds: float
    _seen: dict[tuple[Worker, str], tuple[Any, float]] = field(default_factory=dict)  # what was seen last, since when

    def look(self, now: float | None = None) -> Outcome | None:
        """Return the process that hangs, or None. `now` is a monotonic time."""
        now = time.monotonic() if now is None else now
        beats: dict[Worker, Beat] = {}
        waits: dict[Worker, float] = {}
        silent: set[Worker] = set()
        running = [worker for worker in self.workers if not self.directory.outcome_file(worker).exists()]
        for worker in running:
            beat = beats[worker] = read_beat(self.directory, worker)
            limit = self.timeout_seconds if beat.reached_safe_point else self.loading_seconds
            wait = self._unchanged_for(worker, "progress", (beat.pid, beat.progress, beat.part), now)
            if wait > limit:
                waits[worker] = wait
            if self._unchanged_for(worker, "heartbeat", (beat.pid, beat.number), now) > limit:
                silent.add(worker)
        if not waits:
            return None
        if len(waits) < len(running) and not silent and all(beats[worker].in_collective for worker in waits):
            return None
        blamed = self._blame(waits, beats, silent)
        beat = beats[blamed]
        answers = "" if beat.stack and blamed not in silent else ", and its process no longer answers"
        others = "; ".join(
            f"{other}: '{beats[other].phase}' for {wait:.0f} s"
            + (" (waits for its peers)" if beats[other].waits_for_peers else "")
            for other, wait in sorted(waits.items())
            if other != blamed
        )
        setting = "hang_timeout_seconds" if beat.reached_safe_point else "loading_timeout_seconds"
        error = f"hangs: no progress for {waits[blamed]:.0f} s{answers} (limit launch.{setting})"
        stacks = beat.stack + (f"Also without progress: {others}" if others else "")
        return Outcome(*blamed, error, host=beat.host, phase=beat.phase, traceback=stacks)

    def _unchanged_for(self, worker: Worker, what: str, value: Any, now: float) -> float:
        """Return seconds for which `what` has been seen to have this value."""
        if (worker, what) not in self._seen or self._seen[worker, what][0] != value:
            self._seen[worker, what] = (value, now)
        return now - self._seen[worker, what][1]

    def _blame(self, waits: dict[Worker, float], beats: dict[Worker, Beat], silent: Set[Worker]) -> Worker:
        """Return a worker among those that wait: one that is silent or does not wait for its peers; then the one that
        got least far.
        """

        def order(worker: Worker) -> tuple[Any, ...]:
            beat = beats[worker]
            return worker not in silent, beat.waits_for_peers, beat.progress, beat.in_collective, worker

        return min(waits, key=order)
