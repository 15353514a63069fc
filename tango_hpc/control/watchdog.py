"""Who hangs, from the heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tango_hpc.control.heartbeat import Beat, read_beat
from tango_hpc.control.outcome import Outcome
from tango_hpc.run.directory import RunDirectory

# Until its first safe point a rank imports libraries and loads models, from storage that may be slow.
STARTUP_SECONDS = 600.0


@dataclass
class Watchdog:
    """Finds a hang: a rank has not advanced for `timeout_seconds`, or its heartbeat has stopped for that long.

    Only the order of changes that this process sees counts, never the clocks of other nodes.
    """

    directory: RunDirectory
    world_size: int
    timeout_seconds: float
    _seen: dict[int, tuple[tuple[Any, ...], float]] = field(default_factory=dict)

    def look(self, now: float | None = None) -> Outcome | None:
        """The rank that hangs, or None. `now` is a monotonic time."""
        now = time.monotonic() if now is None else now
        beats: dict[int, Beat] = {}
        waits: dict[int, float] = {}
        for rank in range(self.world_size):
            beat = beats[rank] = read_beat(self.directory, rank)
            mark = (beat.pid, beat.progress)
            if self._seen.get(rank, (None, 0.0))[0] != mark:
                self._seen[rank] = (mark, now)
            wait = now - self._seen[rank][1]
            if wait > self._limit(beat) and not self.directory.outcome_file(rank).exists():
                waits[rank] = wait
        if not waits:
            return None
        rank = self._blame(waits, beats)
        beat = beats[rank]
        silent = "" if beat.stack else ", and its process no longer answers"
        others = "; ".join(
            f"rank {other}: '{beats[other].phase}' for {wait:.0f} s"
            + (" (waits for its peers)" if beats[other].waits_for_peers else "")
            for other, wait in sorted(waits.items())
            if other != rank
        )
        error = f"hangs: no progress for {waits[rank]:.0f} s{silent} (limit launch.hang_timeout_seconds)"
        stacks = beat.stack + (f"Also without progress: {others}" if others else "")
        return Outcome(rank, error, host=beat.host, phase=beat.phase, traceback=stacks)

    def _limit(self, beat: Beat) -> float:
        return self.timeout_seconds if beat.reached_safe_point else max(self.timeout_seconds, STARTUP_SECONDS)

    def _blame(self, waits: dict[int, float], beats: dict[int, Beat]) -> int:
        """Of the ranks that wait, the one that does not wait for its peers; then the one that got least far."""
        return min(waits, key=lambda rank: (beats[rank].waits_for_peers, beats[rank].progress, rank))
