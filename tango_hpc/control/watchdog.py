"""Who hangs, from the heartbeats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tango_hpc.control.heartbeat import Beat, read_beat
from tango_hpc.control.outcome import Outcome
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.worker import Worker


@dataclass
class Watchdog:
    """Finds a hang: a process has not advanced for `timeout_seconds`, or its heartbeat has stopped for that long.

    Whoever waits for others does not hang while any of them advances. Until its first safe point a process imports
    libraries and loads models: then `loading_seconds` is the limit. Only the order of changes that this process sees
    counts, never the clocks of other nodes.
    """

    directory: RunDirectory
    workers: Sequence[Worker]
    timeout_seconds: float
    loading_seconds: float
    _seen: dict[Worker, tuple[tuple[Any, ...], float]] = field(default_factory=dict)

    def look(self, now: float | None = None) -> Outcome | None:
        """The process that hangs, or None. `now` is a monotonic time."""
        now = time.monotonic() if now is None else now
        beats: dict[Worker, Beat] = {}
        waits: dict[Worker, float] = {}
        running = [worker for worker in self.workers if not self.directory.outcome_file(worker).exists()]
        for worker in running:
            beat = beats[worker] = read_beat(self.directory, worker)
            mark = (beat.pid, beat.progress)
            if self._seen.get(worker, (None, 0.0))[0] != mark:
                self._seen[worker] = (mark, now)
            wait = now - self._seen[worker][1]
            if wait > self._limit(beat):
                waits[worker] = wait
        if not waits or (len(waits) < len(running) and all(beats[worker].waits_for_peers for worker in waits)):
            return None
        blamed = self._blame(waits, beats)
        beat = beats[blamed]
        silent = "" if beat.stack else ", and its process no longer answers"
        others = "; ".join(
            f"{other}: '{beats[other].phase}' for {wait:.0f} s"
            + (" (waits for its peers)" if beats[other].waits_for_peers else "")
            for other, wait in sorted(waits.items())
            if other != blamed
        )
        limit = "hang_timeout_seconds" if beat.reached_safe_point else "loading_timeout_seconds"
        error = f"hangs: no progress for {waits[blamed]:.0f} s{silent} (limit launch.{limit})"
        stacks = beat.stack + (f"Also without progress: {others}" if others else "")
        return Outcome(*blamed, error, host=beat.host, phase=beat.phase, traceback=stacks)

    def _limit(self, beat: Beat) -> float:
        return self.timeout_seconds if beat.reached_safe_point else self.loading_seconds

    def _blame(self, waits: dict[Worker, float], beats: dict[Worker, Beat]) -> Worker:
        """Of those that wait, the one that does not wait for its peers; then the one that got least far."""
        return min(waits, key=lambda worker: (beats[worker].waits_for_peers, beats[worker].progress, worker))
