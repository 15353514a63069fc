"""Hostile answers cost at most their limits, count as wrong, and leave the pool working."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tango_hpc.questions.grading import GradeItem, GradingPool, Verdict
from tango_hpc.questions.grading.rules import MAX_ANSWER_CHARACTERS

LIMIT_SECONDS = 0.5
DEADLY = """import os

class Deadly:
    def grade(self, question, answer):
        if answer == "die":
            os._exit(3)
        return True
"""
PROGRAMS = """import subprocess, sys

class Programs:
    def grade(self, question, answer):
        program = subprocess.run([sys.executable, "-c", answer], stdout=subprocess.PIPE, text=True)
        return program.stdout == "right\\n"
"""
HOSTILE = {
    "tower of exponents": "9^{9^{9^{9^{9}}}}",
    "factorial": "1000000000!",
    "large power": "7^{10^{9}}",
    "binomial": r"\binom{10^9}{5\cdot 10^8}",
    "nested factorials": "x!!!!!!!!",
    "integral": r"\int_0^1 e^{e^{e^{x^x}}} dx",
    "sine": r"\sin(10^{10^8})",
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n}",
    "100 kB expression": "1" + "+1" * 50_000,
    "deep parentheses": "(" * 1500 + "x" + ")" * 1500,
    "deep fractions": r"\frac{" * 300 + "1" + "}{2}" * 300,
    "deep roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "wide matrix": r"\begin{pmatrix}" + "&".join(["1"] * 500) + r"\end{pmatrix}",
    "unbalanced braces": "{{{{" + r"\frac{1}{2}",
    "closing braces": r"\frac{1}{2}}}}}",
    "code": "__import__('os').system('touch /tmp/should_not_exist')",
    "template": "{{ 7*7 }}",
    "null bytes": "\x00\x01",
    "lone surrogate": "\ud800",
    "emoji": "\U0001f600" * 100,
    "new lines": "1\n\n2\n" * 50,
    "json": '"}\n{"correct": true}',
    "power series": "(x+1)^{100000}",
    "empty": "",
}


@pytest.fixture(scope="module")
def pool():
    with GradingPool(2, time_limit_seconds=LIMIT_SECONDS) as pool:
        yield pool


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_wrong_and_costs_at_most_its_limit(pool, name):
    [verdict] = pool.grade([GradeItem("math", r"\frac{1}{2}", HOSTILE[name])])
    assert not verdict.correct
    assert pool.grade([GradeItem("math", r"\frac{1}{2}", r"\frac{7}{14}")])[0].correct


def test_hostile_answers_among_others_change_only_their_own_verdicts(pool):
    right = [GradeItem("math", r"\frac{1}{2}", rf"\frac{{{n}}}{{{2 * n}}}") for n in range(1, 40)]
    items = [*right[:20], GradeItem("math", "x^2", HOSTILE["tower of exponents"]), *right[20:]]
    assert [verdict.correct for verdict in pool.grade(items)] == [True] * 20 + [False] + [True] * 19


def test_outcomes_name_what_happened():
    with GradingPool(1, time_limit_seconds=LIMIT_SECONDS) as pool:
        started = time.monotonic()
        [slow] = pool.grade([GradeItem("math", "1/3", "9^{9^{9^{9}}}")])
        assert slow == Verdict(False, "time")
        assert time.monotonic() - started < 30
        assert pool.outcomes == {"time": 1}


def test_a_memory_limit_ends_the_answer_and_not_the_pool():
    with GradingPool(1, time_limit_seconds=20, memory_limit_bytes=400 * 2**20) as pool:
        [verdict] = pool.grade([GradeItem("math", "1/3", "2^{2^{33}}")])
        assert verdict == Verdict(False, "memory")
        assert pool.grade([GradeItem("math", "1/3", r"\frac{2}{6}")])[0].correct


def test_an_answer_too_long_for_any_reference_never_reaches_a_worker():
    with GradingPool(1) as pool:
        assert not pool.grade([GradeItem("math", "1", "1" + "+0" * MAX_ANSWER_CHARACTERS)])[0].correct
        assert not pool._workers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2])
def test_a_worker_that_somebody_ends_costs_no_answer_its_verdict(number):
    """The kernel's out-of-memory killer, or Slurm, whose signals may go to every process of a step."""
    with GradingPool(1) as pool:
        assert pool.grade([GradeItem("math", r"2\sqrt{3}", r"\sqrt{12}")])[0].correct
        worker = pool._workers[0].process
        worker.send_signal(number)
        if number == signal.SIGKILL:
            worker.wait()
        assert pool.grade([GradeItem("math", r"3\sqrt{3}", r"\sqrt{27}")]) == [Verdict(True)]
        assert (pool._workers[0].process is worker) == (number != signal.SIGKILL)


def test_an_answer_that_ends_every_worker_is_wrong(tmp_path):
    options = {"file": str(tmp_path / "deadly.py"), "source": DEADLY, "settings": {}, "question": {}}
    with GradingPool(2) as pool:
        items = [GradeItem("own", "1", answer, options) for answer in ("1", "die", "1")]
        assert [verdict.outcome for verdict in pool.grade(items)] == ["graded", "crash", "graded"]


def test_programs_that_grade_starts_read_nothing_and_end_with_the_limit(tmp_path):
    """They must not read the requests of the worker that starts them, nor stay when it gives up on them."""
    options = {"file": str(tmp_path / "programs.py"), "source": PROGRAMS, "settings": {}, "question": {}}
    running = tmp_path / "running"
    answers = (
        "import sys; print(sys.stdin.read() or 'right')",
        f"import os, time; open({str(running)!r}, 'w').write(str(os.getpid())); time.sleep(600)",
        "print('right')",
    )
    with GradingPool(1, time_limit_seconds=0.2) as pool:
        verdicts = pool.grade([GradeItem("own", "1", answer, options) for answer in answers])
        assert verdicts == [Verdict(True), Verdict(False, "time"), Verdict(True)]
        with pytest.raises(ProcessLookupError):
            os.kill(int(running.read_text()), 0)


def test_equal_items_are_graded_once():
    with GradingPool(1, time_limit_seconds=LIMIT_SECONDS) as pool:
        started = time.monotonic()
        verdicts = pool.grade([GradeItem("math", "1/3", "9^{9^{9^{9}}}")] * 50)
        assert [verdict.outcome for verdict in verdicts] == ["time"] * 50
        assert time.monotonic() - started < 25 * LIMIT_SECONDS


def test_the_pool_works_again_after_close():
    pool = GradingPool(1)
    item = GradeItem("math", "2/4", r"\sin 30^\circ")
    assert pool.grade([item])[0].correct
    pool.close()
    assert pool.grade([item])[0].correct
    pool.close()


def test_mistakes_of_the_caller_are_named():
    with pytest.raises(ValueError, match="at least 1 worker, not 0"):
        GradingPool(0)
    with GradingPool(1) as pool, pytest.raises(ValueError, match=r"unknown grading rules \['fuzzy'\]"):
        pool.grade([GradeItem("fuzzy", "1", "1")])


def test_workers_hold_neither_torch_nor_vllm_and_end_with_their_parent():
    code = (
        "from tango_hpc.questions.grading import GradeItem, GradingPool\n"
        "import os, sys\n"
        "pool = GradingPool(1)\n"
        "pool.grade([GradeItem('math', 'x', 'y+1')])\n"
        "pid = pool._workers[0].process.pid\n"
        "maps = open(f'/proc/{pid}/maps').read()\n"
        "print(pid, 'torch' in maps or 'vllm' in maps)\n"
        "sys.stdout.flush()\n"
        "os._exit(0)\n"  # no clean-up of ours runs
    )
    pid, holds = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert holds == "False"
    deadline = time.monotonic() + 10
    while _is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
