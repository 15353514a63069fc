"""How a rank ended: RUN/outcomes/rank_NNNNN.json, its last act; rank_NNNNN.crash holds the stacks of a crash.

A rank that left neither was killed. What `tango logs` and the supervisor say of a failure comes from here.
"""

from __future__ import annotations

import json
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from tango_hpc.control.heartbeat import read_beat
from tango_hpc.errors import StoppedEarly
from tango_hpc.files import write_atomically
from tango_hpc.run.directory import RunDirectory

STOPPED = StoppedEarly.exit_code


@dataclass(frozen=True)
class Outcome:
    """One rank's end, or that of the ranks together where `rank` is None; the whole run takes its exit code from it."""

    rank: int | None
    error: str = ""
    code: int = 1
    host: str = ""
    phase: str = ""
    traceback: str = ""
    echo: bool = False  # it only broke because another rank had gone
    time: float = 0.0  # Unix seconds

    @property
    def failed(self) -> bool:
        """Whether it neither came to its end nor stopped when told to."""
        return self.code not in (0, STOPPED)

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


def outcome_of(rank: int, phase: str, error: BaseException | None) -> Outcome:
    """The outcome of this process, which `error` ended in `phase`."""
    code = 0 if error is None else getattr(error, "exit_code", 1)
    ended = Outcome(rank, code=code, host=socket.gethostname(), phase=phase, time=time.time())
    if error is None or not ended.failed:
        return ended
    return replace(
        ended,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        echo=_is_echo(error),
    )


def write_outcome(directory: RunDirectory, outcome: Outcome) -> None:
    """Leave word of how a rank ended."""
    assert outcome.rank is not None
    write_atomically(directory.outcome_file(outcome.rank), json.dumps(asdict(outcome)))


def _is_echo(error: BaseException) -> bool:
    """Whether a collective broke because another rank had gone."""
    names = ("DistBackendError", "DistNetworkError", "DistStoreError")
    if isinstance(error, ConnectionError) or type(error).__name__ in names:
        return True
    words = ("connection closed by peer", "connection reset by peer", "broken pipe", "timed out waiting", "gloo")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def read_outcomes(directory: RunDirectory) -> dict[int, Outcome]:
    """How those ranks ended that came to their end themselves, by rank."""
    found = (Outcome(**json.loads(file.read_text())) for file in sorted(directory.outcomes.glob("rank_*.json")))
    return {outcome.rank: outcome for outcome in found if outcome.rank is not None}


def read_failures(directory: RunDirectory) -> list[Outcome]:
    """What ranks wrote down of their failures, the likely cause first: echoes of a lost peer last, else by time."""
    found = [outcome for outcome in read_outcomes(directory).values() if outcome.failed]
    for file in directory.outcomes.glob("rank_*.crash"):
        text = file.read_text(errors="replace")
        if text:
            rank = int(file.stem.removeprefix("rank_"))
            phase, crashed = read_beat(directory, rank).phase, file.stat().st_mtime
            found.append(Outcome(rank, text.splitlines()[0], phase=phase, traceback=text, time=crashed))
    return sorted(found, key=lambda failure: (failure.echo, failure.time))


def find_cause(directory: RunDirectory, deaths: Iterable[Outcome]) -> list[Outcome]:
    """All failures, the cause first: what a rank wrote itself, then ranks that died without a word, then echoes."""
    written = read_failures(directory)
    known = {failure.rank for failure in written}
    silent = [death for death in deaths if death.rank not in known]
    own = [failure for failure in written if not failure.echo]
    return own + silent + [failure for failure in written if failure.echo]


def clear_last_attempt(directory: RunDirectory) -> None:
    """Remove what the ranks of the previous attempt left."""
    for folder in (directory.outcomes, directory.heartbeats):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
