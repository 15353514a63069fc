"""Who hangs, from the heartbeats."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from tango_hpc.control.heartbeat import Beat, read_beat
from tango_hpc.control.outcome import Outcome
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.worker import Worker


@dataclass
class Watchdog:
    """Finds a hang: a process has not advanced for `timeout_seconds`, or its heartbeat has stopped for that long.

    Who stands in a collective does not hang while another process advances. Until its first safe point a process imports
    libraries and loads models: then `loading_seconds` is the limit. Only the order of changes that this process sees
    counts, never the clocks of other nodes.
    """

    directory: RunDirectory
    workers: Sequence[Worker]
    timeout_seconds: float
    loading_seconds: float
    _seen: dict[Worker, tuple[tuple[Any, ...], float]] = field(default_factory=dict)  # how far it was, since when
    _alive: dict[Worker, tuple[int, float]] = field(default_factory=dict)  # its last heartbeat, since when

    def look(self, now: float | None = None) -> Outcome | None:
        """The process that hangs, or None. `now` is a monotonic time."""
        now = time.monotonic() if now is None else now
        beats: dict[Worker, Beat] = {}
        waits: dict[Worker, float] = {}
        running = [worker for worker in self.workers if not self.directory.outcome_file(worker).exists()]
        for worker in running:
            beat = beats[worker] = read_beat(self.directory, worker)
            mark = (beat.pid, beat.progress, beat.part)
            if self._seen.get(worker, (None, 0.0))[0] != mark:
                self._seen[worker] = (mark, now)
            if self._alive.get(worker, (None, 0.0))[0] != beat.number:
                self._alive[worker] = (beat.number, now)
            wait = now - self._seen[worker][1]
            if wait > self._limit(beat):
                waits[worker] = wait
        if not waits:
            return None
        silent = {worker for worker in waits if self._is_silent(worker, beats[worker], now)}
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
        limit = "hang_timeout_seconds" if beat.reached_safe_point else "loading_timeout_seconds"
        error = f"hangs: no progress for {waits[blamed]:.0f} s{answers} (limit launch.{limit})"
        stacks = beat.stack + (f"Also without progress: {others}" if others else "")
        return Outcome(*blamed, error, host=beat.host, phase=beat.phase, traceback=stacks)

    def _limit(self, beat: Beat) -> float:
        return self.timeout_seconds if beat.reached_safe_point else self.loading_seconds

    def _is_silent(self, worker: Worker, beat: Beat, now: float) -> bool:
        return now - self._alive[worker][1] > self._limit(beat)

    def _blame(self, waits: dict[Worker, float], beats: dict[Worker, Beat], silent: Set[Worker]) -> Worker:
        """Of those that wait, one that is silent or does not wait for its peers; then the one that got least far."""

        def order(worker: Worker) -> tuple[Any, ...]:
            beat = beats[worker]
            return worker not in silent, beat.waits_for_peers, beat.progress, beat.in_collective, worker

        return min(waits, key=order)
