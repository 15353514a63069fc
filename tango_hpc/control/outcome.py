"""What the files of the ranks say: who hangs, who failed first, how everybody ended. Pure reading, for the supervisor
and for `tango logs`.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tango_hpc.control.stop import outcome_file
from tango_hpc.run.directory import RunDirectory


@dataclass(frozen=True)
class Failure:
    """One rank's end. `code` is the exit code that the whole run takes from it; `traceback` may be empty."""

    rank: int | None
    error: str
    code: int = 1
    host: str = ""
    phase: str = ""
    traceback: str = ""
    echo: bool = False  # it only broke because another rank had gone

    def title(self) -> str:
        """One line that names rank, node and phase."""
        if self.rank is None:
            return self.error
        where = f" on {self.host}" if self.host else ""
        phase = f" in phase '{self.phase}'" if self.phase else ""
        return f"rank {self.rank}{where} failed{phase}: {self.error}"

    def text(self) -> str:
        """The title and the traceback."""
        return f"{self.title()}\n{self.traceback}".rstrip()


def clear_last_attempt(directory: RunDirectory) -> None:
    """Removes what the ranks of the previous attempt left in `failures/` and `heartbeat/`."""
    for folder in (directory.failures, directory.heartbeats):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink(missing_ok=True)


def is_loading(directory: RunDirectory) -> bool:
    """Whether the ranks have not come to their first safe point: there is nothing to save."""
    return not (_read_beat(directory.heartbeat_file(0)) or {}).get("reached_safe_point", False)


def read_outcomes(directory: RunDirectory) -> dict[int, int]:
    """Exit code by rank, of those ranks that came to their end themselves."""
    outcomes = (json.loads(file.read_text()) for file in directory.heartbeats.glob("rank_*.outcome"))
    return {outcome["rank"]: outcome["code"] for outcome in outcomes}


def read_failures(directory: RunDirectory) -> list[Failure]:
    """The failures that ranks wrote down, the likely cause first: echoes of a lost peer last, otherwise by time."""
    found: list[tuple[bool, float, Failure]] = []
    for file in sorted(directory.failures.glob("rank_*.json")):
        data = json.loads(file.read_text())
        names = ("rank", "error", "host", "phase", "traceback")
        failure = Failure(**{name: data[name] for name in names}, code=data["exit_code"], echo=data["because_of_peer"])
        found.append((failure.echo, data["time"], failure))
    for file in sorted(directory.failures.glob("rank_*.crash")):
        text = file.read_text(errors="replace")
        if text:
            rank = int(file.stem.removeprefix("rank_"))
            first_line = text.splitlines()[0]
            failure = Failure(rank, first_line, phase=_last_phase(directory, rank), traceback=text)
            found.append((False, file.stat().st_mtime, failure))
    return [failure for _, _, failure in sorted(found, key=lambda item: item[:2])]


def find_cause(directory: RunDirectory, deaths: Iterable[Failure]) -> list[Failure]:
    """All failures, the cause first: what a rank wrote itself, then ranks that died without a word, then echoes."""
    written = read_failures(directory)
    own = [failure for failure in written if not failure.echo]
    known = {failure.rank for failure in written}
    silent = [death for death in deaths if death.rank not in known]
    return own + silent + [failure for failure in written if failure.echo]


def death(directory: RunDirectory, rank: int, returncode: int) -> Failure:
    """A rank that ended with `returncode` (negative: a signal), as far as that alone tells."""
    if returncode < 0:
        error = f"killed by {signal.Signals(-returncode).name}"
        if returncode == -signal.SIGKILL:
            error += " (out of memory? see dmesg, or seff and sacct on a cluster)"
    else:
        error = f"exit code {returncode}"
    beat = _read_beat(directory.heartbeat_file(rank)) or {}
    return Failure(rank, error, host=beat.get("host", ""), phase=beat.get("phase", "starting"))


_SRUN_ERROR = re.compile(r"^srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<what>.+)$", re.MULTILINE)


def deaths_in_srun_output(directory: RunDirectory, text: str) -> list[Failure]:
    """The ranks that srun reports as killed or failed, in the order in which it noticed."""
    deaths: list[Failure] = []
    for match in _SRUN_ERROR.finditer(text):
        rank = int(re.split(r"[,\-\[\]]", match["tasks"].strip("[]"))[0])
        what = match["what"]
        if what == "Killed":
            what = "killed by SIGKILL (out of memory? see seff or sacct)"
        deaths.append(Failure(rank, what, host=match["host"], phase=_last_phase(directory, rank)))
    return deaths


def _last_phase(directory: RunDirectory, rank: int) -> str:
    return (_read_beat(directory.heartbeat_file(rank)) or {}).get("phase", "starting")


def _read_beat(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


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

    def look(self, now: float | None = None) -> Failure | None:
        """The rank that hangs, or None. `now` is a monotonic time."""
        now = time.monotonic() if now is None else now
        beats: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            beat = _read_beat(self.directory.heartbeat_file(rank)) or {}
            if outcome_file(self.directory, rank).exists():
                beat["ended"] = True
            beats[rank] = beat
            mark = (beat.get("pid"), beat.get("progress"), beat.get("ended"))
            if self._seen.get(rank, (None, 0.0))[0] != mark:
                self._seen[rank] = (mark, now)
        waits = {
            rank: now - since
            for rank, (_, since) in self._seen.items()
            if not beats[rank].get("ended") and now - since > self._limit(beats[rank])
        }
        if not waits:
            return None
        rank = self._blame(waits, beats)
        beat = beats[rank]
        silent = "" if beat.get("stack") else ", and its process no longer answers"
        others = "; ".join(
            f"rank {other}: '{beats[other].get('phase', 'starting')}' for {wait:.0f} s"
            + (" (waits for its peers)" if beats[other].get("waits_for_peers") else "")
            for other, wait in sorted(waits.items())
            if other != rank
        )
        error = f"hangs: no progress for {waits[rank]:.0f} s{silent} (limit launch.hang_timeout_seconds)"
        return Failure(
            rank,
            error,
            host=beat.get("host", ""),
            phase=beat.get("phase", "starting"),
            traceback=beat.get("stack", "") + (f"Also without progress: {others}" if others else ""),
        )

    def _limit(self, beat: dict[str, Any]) -> float:
        return self.timeout_seconds if beat.get("reached_safe_point") else max(self.timeout_seconds, STARTUP_SECONDS)

    def _blame(self, waits: dict[int, float], beats: dict[int, dict[str, Any]]) -> int:
        """Of the ranks that wait, the one that does not wait for its peers; then the one that got least far."""
        return min(
            waits, key=lambda rank: (bool(beats[rank].get("waits_for_peers")), beats[rank].get("progress", -1), rank)
        )
