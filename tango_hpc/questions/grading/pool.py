"""Grading in worker processes: hostile answers cost at most their limits and never the run.

    with GradingPool() as pool:
        verdicts = pool.grade([GradeItem("math", gold, answer), ...])

A worker that runs out of its time or memory is replaced, and its answer is wrong. Verdicts come in the order
of the items and do not depend on how many workers there are. Equal items are graded once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tango_hpc.questions.grading.grader_process import WALL_FACTOR
from tango_hpc.questions.grading.rules import RULES, shortcut

DEFAULT_TIME_LIMIT_SECONDS = 3.0  # the slowest gold answer of MATH, MATH-500 and OlympiadBench takes 0.15
DEFAULT_MEMORY_LIMIT_BYTES = 2**30  # of address space; an idle worker has mapped about a quarter of it
_START_SECONDS = 120
_REQUESTS_PER_WORKER = 5000  # then a fresh one: caches and fragmentation must not reach the memory limit


@dataclass(frozen=True)
class GradeItem:
    """One answer to grade by a rule of `rules.RULES`; `options` are that rule's keyword arguments."""

    rule: str
    gold: str
    answer: str
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """`outcome` says how it came about: "graded", or "time", "memory", "crash" or "error" (all of them wrong), which
    `error` describes. `labels` are what the rule own_steps gives instead. `score` and its `parts`: of a task that
    scores answers.
    """

    correct: bool = False
    outcome: str = "graded"
    labels: list[int] | None = None
    error: str = ""
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Eq. 2: the score, or 1 for a right answer and 0 for a wrong one."""
        return float(self.correct) if self.score is None else self.score


# Of a question without an answer, before its solutions have a majority, and where they have none.
NO_MAJORITY = Verdict(outcome="no majority")


def parts_as_json(verdict: Verdict) -> str | None:
    """Return the parts of a score; None where there are none."""
    return json.dumps(verdict.parts) if verdict.parts else None


class NoWorker(RuntimeError):
    """A worker ended, or was silent for two minutes, before it was asked anything."""


class _Worker:
    def __init__(self, time_limit_seconds: float, memory_limit_bytes: int) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        environment["PYTHONHASHSEED"] = "0"  # the order of sympy's sets, hence of its rewriting, in every run
        package_root = str(Path(__file__).parents[3])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
        command = [
            sys.executable,
            "-P",
            "-m",
            "tango_hpc.questions.grading.grader_process",
            str(time_limit_seconds),
            str(memory_limit_bytes),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.is_ready = False
        self.num_requests = 0
        self.deadline = time.monotonic() + _START_SECONDS  # infinite while nothing is asked of it
        self.key: str | None = None
        self._received = b""

    def send(self, request: str, wall_seconds: float) -> None:
        self.num_requests += 1
        self.key = request
        self.deadline = time.monotonic() + wall_seconds
        with contextlib.suppress(BrokenPipeError):  # just died: reading its stdout says so and settles the request
            self.stdin.write(request.encode() + b"\n")
            self.stdin.flush()

    def read_line(self) -> str | None:
        """Return one complete line, "" while it is incomplete, None at the end of the stream."""
        block = os.read(self.stdout.fileno(), 65536)
        if not block:
            return None
        self._received += block
        if not self._received.endswith(b"\n"):
            return ""
        line, self._received = self._received.decode(), b""
        return line

    def close(self) -> int:
        """Kill, reap and return the exit status (negative: the signal that had ended it before)."""
        status = self.process.poll()
        if status is None:
            self.process.kill()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()
        return 0 if status is None else status


class GradingPool:
    """Worker processes for one process of ours. Workers start when first needed, in about half a second.

    In a job of many ranks let one rank grade each answer and share the verdicts: a time limit is CPU time,
    yet two ranks may differ on an answer that takes just that long.
    """

    def __init__(
        self,
        num_workers: int = 2,
        *,
        time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
        memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a grading pool needs at least 1 worker, not {num_workers}")
        self.num_workers = num_workers
        self.time_limit_seconds = time_limit_seconds
        self.memory_limit_bytes = memory_limit_bytes
        self.outcomes: Counter[str] = Counter()
        self._workers: list[_Worker] = []
        self._crashed: set[str] = set()  # requests that a worker ended at, once
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; the pool may be used again."""
        while self._workers:
            self._workers.pop().close()
        atexit.unregister(self.close)

    def grade(self, items: Iterable[GradeItem]) -> list[Verdict]:
        """Return the verdict of each item, in order. `outcomes` counts them over the life of the pool."""
        items = list(items)
        unknown = sorted({item.rule for item in items} - set(RULES))
        if unknown:
            raise ValueError(f"unknown grading rules {unknown}; there are {sorted(RULES)}")
        verdicts: dict[str, Verdict] = {}
        keys = []
        for item in items:
            key = json.dumps({"rule": item.rule, "gold": item.gold, "answer": item.answer, "options": item.options},
                             sort_keys=True)  # fmt: skip
            keys.append(key)
            if key not in verdicts:
                known = shortcut(item.rule, item.gold, item.answer, item.options)
                verdicts[key] = Verdict(known) if known is not None else _PENDING
        self._grade_in_workers(verdicts)
        results = [verdicts[key] for key in keys]
        self.outcomes.update(verdict.outcome for verdict in results)
        return results

    def _grade_in_workers(self, verdicts: dict[str, Verdict]) -> None:
        waiting = deque(key for key, verdict in verdicts.items() if verdict is _PENDING)
        num_pending = len(waiting)
        while len(self._workers) < min(self.num_workers, num_pending):
            self._workers.append(self._start())
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
                if worker.is_ready:
                    self._send(worker, waiting)
            while num_pending:
                nearest = min(worker.deadline for worker in self._workers)
                for selected, _ in selector.select(max(0.0, nearest - time.monotonic())):
                    num_pending -= self._receive(selected.data, selector, waiting, verdicts)
                for worker in list(self._workers):
                    if time.monotonic() > worker.deadline:
                        num_pending -= self._replace(worker, selector, waiting, verdicts, outcome="time")

    def _receive(self, worker: _Worker, selector: selectors.BaseSelector, waiting: deque[str],
                 verdicts: dict[str, Verdict]) -> int:  # fmt: skip
        """Handle what a worker wrote; returns how many items that settles."""
        line = worker.read_line()
        if line is None:
            return self._replace(worker, selector, waiting, verdicts)
        if not line:
            return 0
        worker.deadline = math.inf
        if not worker.is_ready:
            worker.is_ready = True
            self._send(worker, waiting)
            return 0
        assert worker.key is not None
        answer = json.loads(line)
        verdicts[worker.key] = Verdict(**answer)
        self._crashed.discard(worker.key)
        worker.key = None
        if answer["outcome"] == "memory" or worker.num_requests >= _REQUESTS_PER_WORKER:
            self._replace(worker, selector, waiting, verdicts)
        else:
            self._send(worker, waiting)
        return 1

    def _replace(self, worker: _Worker, selector: selectors.BaseSelector, waiting: deque[str],
                 verdicts: dict[str, Verdict], outcome: str | None = None) -> int:  # fmt: skip
        """Put a fresh worker in the place of one that ended, and settle what it was grading as wrong.

        The answer at which a worker ended is graded once more: something else may have ended the worker.
        """
        selector.unregister(worker.stdout)
        if not worker.is_ready:
            worker.close()
            raise NoWorker(
                "a grading worker did not start (it needs the address space that `ulimit -v` may keep from it); try:"
                f" {sys.executable} -P -m tango_hpc.questions.grading.grader_process {self.time_limit_seconds}"
                f" {self.memory_limit_bytes}"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):  # still alive: close() kills it
            worker.process.wait(timeout=0.5 if outcome is None and worker.key else 0)
        status = worker.close()
        settled = 0
        if worker.key is not None:
            outcome = outcome or ("time" if status == -_SIGPROF else "crash")
            if outcome == "crash" and worker.key not in self._crashed:
                self._crashed.add(worker.key)
                waiting.appendleft(worker.key)
            else:
                self._crashed.discard(worker.key)
                verdicts[worker.key] = Verdict(False, outcome)
                settled = 1
        position = self._workers.index(worker)
        self._workers[position] = self._start()
        selector.register(self._workers[position].stdout, selectors.EVENT_READ, self._workers[position])
        return settled

    def _send(self, worker: _Worker, waiting: deque[str]) -> None:
        if waiting:
            worker.send(waiting.popleft(), self.time_limit_seconds * WALL_FACTOR)

    def _start(self) -> _Worker:
        return _Worker(self.time_limit_seconds, self.memory_limit_bytes)


_PENDING = Verdict(False, "pending")
_SIGPROF = int(signal.SIGPROF)  # what ends a worker at its limit of CPU time
