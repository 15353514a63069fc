"""The process that stays with a run: starts its ranks, watches them, passes a stop on, says how it ended. No torch.

Codes: 0 done; 85 saved and resumable; 78 or 2 wrong input, trying again cannot help; 75 a node kept the ranks from
starting; 1 failed. The same class serves one machine and, around srun, a Slurm job.

A stop's way (Ctrl-C, SIGTERM, SIGUSR2, a near time limit; `tango stop` joins at the file), => for a message:
signal => `Supervisor._receive` -> `request_stop` => control/stop: `RankProcess.check` on rank 0 -> `Exchange.any` =>
all processes: `Tango._safe_point` -> `save` -> `Checkpoints.save`; `StoppedEarly` -> `run_guarded` => outcomes/:
`Supervisor.run` -> `run_attempt` -> `scontrol requeue`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console

from tango_hpc.base.config.schema import Config
from tango_hpc.base.errors import CheckFailed, NodeFailed
from tango_hpc.base.files import Patience, explain_disk, is_of_disk
from tango_hpc.base.formats import say
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.deadline import AwakeClock, Deadline
from tango_hpc.runner.heartbeat import RANKS_AT_FULL_PACE, is_loading
from tango_hpc.runner.outcome import STOPPED, Outcome, clear_last_attempt, find_cause, read_outcomes
from tango_hpc.runner.polling import poll
from tango_hpc.runner.program import View
from tango_hpc.runner.starters import Starter
from tango_hpc.runner.stop import StopRequest, read_stop_request, request_stop
from tango_hpc.runner.watchdog import Watchdog

CLOCK = 0  # stands among the signals for the deadline
REQUESTS: dict[int, StopRequest] = {
    CLOCK: StopRequest("supervisor", "the time limit is near"),
    signal.SIGINT: StopRequest("user", "Ctrl-C"),
    signal.SIGHUP: StopRequest("supervisor", "the terminal was closed"),
    signal.SIGTERM: StopRequest("supervisor", "SIGTERM (preempted or cancelled)"),
    signal.SIGUSR2: StopRequest("supervisor", "SIGUSR2 (the time limit is near)"),
}

POLL_SECONDS = 0.2
WATCH_SECONDS = 2.0
# After the first failure the other ranks get this long to write down their own.
LAST_WORDS_SECONDS = 3.0
TEARDOWN_SECONDS = 30.0
# Beyond a round of watching, of the time between two rounds no more counts: the job was suspended, with its ranks.
LONGEST_GAP_SECONDS = 10.0
# A pause that may have outlasted what its ranks waited for, and is longer than Slurm takes to answer.
PAUSE_SECONDS = 120.0
ENDED_WHILE_LOADING = "ended while loading, there was nothing to save"
# A rank that exits with 0 has written its outcome, but NFS shows a new file of another node up to a minute late.
VISIBLE_SECONDS = 60.0


@dataclass
class Limits:
    """Times by the supervisor's clock. `save_by` and `exit_by` are set once the ranks must stop or are done."""

    next_look: float = 0.0
    save_by: float | None = None
    exit_by: float | None = None


@dataclass
class Supervisor:
    """One attempt of one stage, whose ranks have one process for each of `roles`.

    `deadline` is when the machine takes the ranks away, if it does.
    """

    directory: RunDirectory
    config: Config
    roles: Sequence[str]
    starter: Starter
    console: Console
    view: Callable[[], AbstractContextManager[View]]
    deadline: Deadline | None = None
    on_poll: Callable[[], None] | None = None
    failures: list[Outcome] = field(default_factory=list)
    request: StopRequest | None = None  # to stop, that came while it ran
    was_suspended: bool = False
    _ended_while_loading: bool = False
    _signals: list[int] = field(default_factory=list)
    _unsaid: OSError | None = None  # why the ranks do not know of the first signal yet

    def run(self) -> int:
        """Run the attempt to its end and return its exit code; nothing of it is left running."""
        clear_last_attempt(self.directory)
        with self._catching_signals():
            try:
                self.starter.start()
                with self.view() as view:
                    self._watch(view)
                    view.finish()
            except NodeFailed as error:
                self.failures = [Outcome(None, error=str(error), code=error.exit_code)]
            finally:
                self.starter.kill()
        if self._ended_while_loading:
            return STOPPED
        if self.config.launch.nodes > 1:
            self._await_cause()
        ended_well = self._await_outcomes()
        if ended_well is not None:
            return ended_well
        if not self.failures:
            self.failures = find_cause(self.directory, self.starter.deaths())
        if not self.failures:
            told = f"{self.request.why}: " if self.request else ""
            self.failures = [Outcome(None, error=f"{told}the ranks were ended before their next safe point")]
        self._tell_failures()
        return self.failures[0].code

    def _await_outcomes(self) -> int | None:
        """Wait until every process has an outcome or one is known to have failed; return the code of a good end."""

        def are_known() -> bool:
            ended = self._all_ended(read_outcomes(self.directory))
            return ended or bool(self.failures or self.starter.deaths())

        poll(are_known, VISIBLE_SECONDS, every=POLL_SECONDS)
        outcomes = read_outcomes(self.directory)
        codes = {outcome.code for outcome in outcomes.values()}
        if self.failures or not self._all_ended(outcomes) or not codes <= {0, STOPPED}:
            return None
        if codes == {0}:
            return 0
        # A request that came in the last moment counts too; without any, signals went to the ranks themselves.
        to_ranks = StopRequest("supervisor", "a signal to the ranks")
        announced = self.request is not None
        self.request = read_stop_request(self.directory) or self.request or to_ranks
        if not announced:
            self._tell(f"{self.request.why}: saved at the next safe point")
        return STOPPED

    def _tell_failures(self) -> None:
        """Say the first failure in full, others that differ in a line, and how many followed from it."""
        self._tell(self.failures[0].text())
        said = {self.failures[0].error}  # what all have agreed on, all of them say
        for other in self.failures[1:]:
            if not other.echo and other.error not in said:
                self._tell(other.title())
                said.add(other.error)
        if len(self.failures) > len(said):
            others = len(self.failures) - len(said)
            self._tell(f"{others} of the other processes ended because of it (`tango logs` has their words)")

    @property
    def workers(self) -> list[Worker]:
        """Every process of the attempt."""
        return [Worker(rank, role) for rank in range(self.config.world_size) for role in self.roles]

    def _all_ended(self, outcomes: Mapping[Worker, Outcome]) -> bool:
        return all(worker in outcomes for worker in self.workers)

    @property
    def reason(self) -> str:
        """Return why the attempt ended, in one line."""
        if self.failures:
            return self.failures[0].title()
        loading = f": {ENDED_WHILE_LOADING}" if self._ended_while_loading else ""
        return f"{self.request.why}{loading}" if self.request else ""

    @property
    def stopped_by_user(self) -> bool:
        """Return whether a user ended the run for good."""
        return self.request is not None and self.request.by == "user"

    def _watch(self, view: View) -> None:
        """Look at the ranks until they have ended or must be ended."""
        launch = self.config.launch
        watchdog = Watchdog(self.directory, self.workers, launch.hang_timeout_seconds, launch.loading_limit_seconds)
        limits = Limits()
        pace = max(1.0, self.config.world_size / RANKS_AT_FULL_PACE)  # spares the file system of a large run
        clock = AwakeClock(POLL_SECONDS * pace + LONGEST_GAP_SECONDS)
        patience = Patience(launch.hang_timeout_seconds)
        while self.starter.running():
            time.sleep(POLL_SECONDS * pace)
            now = clock.now()
            self.was_suspended = clock.longest_pause > PAUSE_SECONDS
            if self._signals.count(signal.SIGINT) > 1:
                self.failures = [Outcome(None, error="second Ctrl-C: ended without saving")]
                return
            with patience:
                if self.on_poll is not None:
                    self.on_poll()
                if now >= limits.next_look:
                    view.refresh()
                    limits.next_look = now + WATCH_SECONDS * pace
                    hang = watchdog.look(now)
                    if hang is not None:
                        self.failures = [hang]
                        return
                if self._have_ended(now, limits) or self._must_end(now, limits):
                    return

    def _have_ended(self, now: float, limits: Limits) -> bool:
        """Return whether a process failed, or all have an outcome and still run after `TEARDOWN_SECONDS`."""
        outcomes = read_outcomes(self.directory)
        # What happens after a rank's outcome is teardown, not training.
        died = not self._all_ended(outcomes) and any(
            death.rank is None or any(w.rank == death.rank and w not in outcomes for w in self.workers)
            for death in self.starter.deaths()
        )
        if died or any(outcome.failed for outcome in outcomes.values()):
            self._await_last_words()
            return True
        if not self._all_ended(outcomes):
            return False
        limits.exit_by = limits.exit_by or now + TEARDOWN_SECONDS
        if now <= limits.exit_by:
            return False
        self._tell(f"all ranks are done, but did not exit within {TEARDOWN_SECONDS:.0f} s: ended")
        return True

    def _must_end(self, now: float, limits: Limits) -> bool:
        """Pass a stop request on; return whether the ranks must be ended for it.

        They must be where nothing can be saved yet, and where they took longer than `launch.grace_seconds`.
        """
        grace_seconds = self.config.launch.grace_seconds
        if self._unsaid is not None:
            self._pass_on()
        if limits.save_by is None:
            if self.deadline is not None and self.deadline.is_near(grace_seconds):
                self._receive(CLOCK)
            self.request = read_stop_request(self.directory) or self._received
            if self.request is None:
                return False
            if is_loading(self.directory):
                self._ended_while_loading = True
                self._tell(self.reason)
                return True
            limits.save_by = now + max(grace_seconds, 1.0)
            self._tell(f"{self.request.why}: saving at the next safe point (at most {grace_seconds:.0f} s)")
        if now <= limits.save_by:
            return False
        self.failures = [self._too_late(grace_seconds)]
        return True

    def _await_cause(self) -> None:
        """Wait for the outcome of the first failure, which may lie on another node, where all known failures are echoes
        of it.
        """

        def is_known() -> bool:
            if not self.failures or not all(failure.echo for failure in self.failures):
                return True
            if self._all_ended(read_outcomes(self.directory)):
                return True
            self.failures = find_cause(self.directory, self.starter.deaths())
            return False

        poll(is_known, VISIBLE_SECONDS, every=POLL_SECONDS)

    def _await_last_words(self) -> None:
        poll(lambda: not self.starter.running(), LAST_WORDS_SECONDS, every=POLL_SECONDS)
        self.failures = find_cause(self.directory, self.starter.deaths())

    def _tell(self, message: str) -> None:
        say(self.console, message)

    def _receive(self, number: int, frame: FrameType | None = None) -> None:
        """Turn the first signal into a request to the ranks, in the signal's handler."""
        self._signals.append(number)
        if len(self._signals) == 1:
            self._pass_on()

    @property
    def _received(self) -> StopRequest | None:
        return REQUESTS[self._signals[0]] if self._signals else None

    def _pass_on(self) -> None:
        """Leave word of the first signal for the ranks; on a disk that takes nothing more it is tried again."""
        assert self._received is not None
        try:
            request_stop(self.directory, self._received)
            self._unsaid = None
        except OSError as error:
            self._unsaid = error

    def _too_late(self, grace_seconds: float) -> Outcome:
        ended = f"no safe point within launch.grace_seconds={grace_seconds:.0f}: ended without saving"
        if self._unsaid is None:
            return Outcome(None, error=ended)
        if not is_of_disk(self._unsaid):
            return Outcome(None, error=f"{ended}; the ranks could not be told: {self._unsaid}")
        told = f"{ended}; the ranks could not be told: {explain_disk(self._unsaid)}"
        return Outcome(None, error=told, code=CheckFailed.exit_code)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        watched = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is
            watched.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self._receive) for number in watched}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
