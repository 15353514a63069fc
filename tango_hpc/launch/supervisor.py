"""The process that stays with a run: starts its ranks, watches them, passes a stop on, says how it ended. No torch.

Codes: 0 done; 85 saved and resumable; 78 or 2 wrong input, trying again cannot help; 1 failed. A stop (Ctrl-C, SIGTERM,
SIGUSR2, a near time limit, `tango stop`) becomes the file `control/stop`, which rank 0 reads at its safe points. The
same class serves one machine and, around srun, a Slurm job.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console

from tango_hpc.config.schema import Config
from tango_hpc.errors import StoppedEarly
from tango_hpc.files import write_atomically
from tango_hpc.launch.starters import Starter
from tango_hpc.launch.watch import Failure, Watchdog, clear_last_attempt, find_cause, is_loading, read_outcomes
from tango_hpc.report.progress import ProgressView
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.interrupt import RANKS_AT_FULL_PACE

STOPPED = StoppedEarly.exit_code
# Begins a stop file that the supervisor wrote; any other is a user's wish to end the run for good.
WROTE_STOP_FILE = "supervisor: "
SIGNAL_REASONS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "the terminal was closed",
    signal.SIGTERM: "SIGTERM (preempted or cancelled)",
    signal.SIGUSR2: "SIGUSR2 (the time limit is near)",
}

POLL_SECONDS = 0.2
WATCH_SECONDS = 2.0
# After the first failure the other ranks get this long to write down their own.
LAST_WORDS_SECONDS = 3.0
TEARDOWN_SECONDS = 30.0


@dataclass
class Supervisor:
    """One attempt of one stage. `deadline` is the Unix time at which the machine takes the ranks away, if known."""

    directory: RunDirectory
    config: Config
    starter: Starter
    console: Console
    deadline: float | None = None
    on_poll: Callable[[], None] | None = None
    failures: list[Failure] = field(default_factory=list)
    stop_reason: str | None = None
    stopped_by_user: bool = False
    _ended_while_loading: bool = False
    _signals: list[signal.Signals] = field(default_factory=list)

    def run(self) -> int:
        """Runs the attempt to its end and returns its exit code; nothing of it is left running."""
        clear_last_attempt(self.directory)
        with self._catching_signals():
            try:
                self.starter.start()
                with ProgressView(self.directory, self.console) as view:
                    self._watch(view)
                    view.finish()
            finally:
                self.starter.kill()
        return self._conclude()

    def _watch(self, view: ProgressView) -> None:
        launch = self.config.launch
        watchdog = Watchdog(self.directory, self.config.world_size, launch.hang_timeout_seconds)
        stop_by: float | None = None  # when ranks that were told to stop are killed, in monotonic time
        gone_by: float | None = None  # when ranks that have said their last word but do not end are killed
        next_look = 0.0
        patience = max(1.0, self.config.world_size / RANKS_AT_FULL_PACE)  # spares the file system of a large run
        while self.starter.running():
            time.sleep(POLL_SECONDS * patience)
            if self.on_poll is not None:
                self.on_poll()
            if time.monotonic() >= next_look:
                view.refresh()
                hang = watchdog.look()
                next_look = time.monotonic() + WATCH_SECONDS * patience
                if hang is not None:
                    self.failures = [hang]
                    return
            outcomes = read_outcomes(self.directory)
            if self._deaths(outcomes) or any(code not in (0, STOPPED) for code in outcomes.values()):
                self._await_last_words()
                return
            if len(outcomes) == self.config.world_size:
                gone_by = gone_by or time.monotonic() + TEARDOWN_SECONDS
                if time.monotonic() > gone_by:
                    self._tell(f"all ranks are done, but did not exit within {TEARDOWN_SECONDS:.0f} s: ended")
                    return
            if stop_by is None and self._stop_wanted():
                if is_loading(self.directory):
                    self._tell(f"{self.stop_reason}: ended while loading, there was nothing to save")
                    self._ended_while_loading = True
                    return
                stop_by = time.monotonic() + max(launch.grace_seconds, 1.0)
                self._tell(f"{self.stop_reason}: saving at the next safe point (at most {launch.grace_seconds:.0f} s)")
            if self._signals.count(signal.SIGINT) > 1:
                self.failures = [Failure(None, "second Ctrl-C: ended without saving")]
                return
            if stop_by is not None and time.monotonic() > stop_by:
                limit = f"launch.grace_seconds={launch.grace_seconds:.0f}"
                self.failures = [Failure(None, f"no safe point within {limit}: ended without saving")]
                return

    def _stop_wanted(self) -> bool:
        """Whether there is reason to stop; leaves the request for the ranks, if it is not there already."""
        if self.directory.stop_file.exists():
            self.stop_reason = self.directory.stop_file.read_text().strip() or "tango stop"
            self.stopped_by_user = True
            return True
        if self._signals:
            first = self._signals[0]
            self.stopped_by_user = first == signal.SIGINT
            self.stop_reason = SIGNAL_REASONS.get(first, first.name)
        elif self.deadline is not None and time.time() > self.deadline - self.config.launch.grace_seconds:
            self.stop_reason = "the time limit is near"
        else:
            return False
        write_atomically(self.directory.stop_file, f"{WROTE_STOP_FILE}{self.stop_reason}\n")
        return True

    @property
    def reason(self) -> str:
        """Why the attempt ended, in one line."""
        if self.failures:
            return self.failures[0].title()
        return self.stop_reason or ""

    def _await_last_words(self) -> None:
        until = time.monotonic() + LAST_WORDS_SECONDS
        while self.starter.running() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self.failures = find_cause(self.directory, self.starter.deaths())

    def _deaths(self, outcomes: dict[int, int]) -> list[Failure]:
        """Bad ends of ranks that had not finished: what happens after the last word is teardown, not training."""
        return [death for death in self.starter.deaths() if death.rank is None or death.rank not in outcomes]

    def _conclude(self) -> int:
        if self._ended_while_loading:
            return STOPPED
        outcomes = read_outcomes(self.directory)
        if not self.failures and len(outcomes) == self.config.world_size:
            codes = set(outcomes.values())
            if codes == {0}:
                return 0
            if codes <= {0, STOPPED}:
                self.stop_reason = self.stop_reason or "a signal to the ranks"
                return STOPPED
        if not self.failures:
            self.failures = find_cause(self.directory, self.starter.deaths())
        if not self.failures:
            told = f"{self.stop_reason}: " if self.stop_reason else ""
            self.failures = [Failure(None, f"{told}the ranks were ended before their next safe point")]
        self._tell(self.failures[0].text())
        for other in self.failures[1:]:
            self._tell(other.title())
        return self.failures[0].code

    def _tell(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        def receive(number: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number))

        watched = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is
            watched.append(signal.SIGHUP)
        previous = {number: signal.signal(number, receive) for number in watched}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
