"""A process of a rank, as its own code sees it: the heart reports phases, the stop signal answers "must I stop?"."""

from __future__ import annotations

from collections.abc import Callable

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.runner.heartbeat import Heart, PhaseBoard
from tango_hpc.runner.stop import StopSignal


class RankProcess:
    """One process of one rank and role. `reads_file`: this process looks for requests to stop; one of them does."""

    def __init__(
        self, directory: RunDirectory, worker: Worker, *, reads_file: bool, board: PhaseBoard | None = None
    ) -> None:
        self.directory, self.worker = directory, worker
        self.heart = Heart(directory, worker, board)
        self.stop = StopSignal(directory, reads_file=reads_file)
        # Set by code with a GPU: how to ask whether the calling thread's stream is busy.
        self.watch_stream: Callable[[], Callable[[], bool]] | None = None

    def start(self) -> None:
        """Install the signal handlers and start the heartbeat; call this before anything slow."""
        self.stop.install()
        self.heart.start()

    def has_loaded(self) -> None:
        """Let the heartbeat ask whether the GPU is busy: engines have started and captured their graphs."""
        if self.watch_stream is not None:
            self.heart.gpu_is_busy = self.watch_stream()

    def check(self, phase: str) -> bool:
        """Pass a safe point before `phase`; return whether to save and stop now. A collective over all processes."""
        self.heart.reached_safe_point = True
        self.has_loaded()
        self.heart.enter(phase)
        return self.stop.must_stop()
