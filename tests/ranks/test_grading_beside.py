"""Answers are graded while a model generates: in shares, and settled before anybody asks for a verdict."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks

ANSWERS = ["12", "13", None, r"\frac{24}{2}", "6*2"]


def graded_beside(fails: bool) -> dict[str, Any]:
    """On each rank: what is graded of `ANSWERS` before and after `settle`, by real workers held back until then."""
    import torch.distributed as dist

    from tango_hpc.models.parallel.exchange import Exchange, PeerFailedError
    from tango_hpc.questions.protocol.solution import Solution
    from tango_hpc.questions.tasks.math import Math
    from tango_hpc.stages.responses import NOT_ASKED, Grading, ReadSolution, Response

    generated = threading.Event()
    seen: dict[str, Any] = {"asked": []}

    class Held(Math):
        def grade_all(self, answers: Any) -> Any:
            assert generated.wait(60), "grading was waited for before anything else could be generated"
            seen["asked"] += [answer for _, answer in answers]
            if fails and dist.get_rank() == 0:
                raise OSError(28, "No space left on device")
            return super().grade_all(answers)

    row = {"id": "0", "question": "", "answer": "12", "source": "math"}
    solutions = [
        ReadSolution(row, "", Response([], NOT_ASKED, ""), Solution([], None, True, "", ""), answer, [])
        for answer in ANSWERS
    ]
    grading = Grading(Held(), solutions, Exchange(["generator"], "generator"))
    seen["before"] = [read.graded for read in solutions]
    try:
        _ = solutions[0].correct
    except AssertionError as error:
        seen["too early"] = str(error)
    generated.set()
    try:
        grading.settle()
        grading.settle()  # again: nothing is exchanged twice
    except (OSError, PeerFailedError) as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["after"] = [read.correct if read.graded else None for read in solutions]
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_workers_grade_while_others_generate(num_ranks: int) -> None:
    seen = run_ranks(graded_beside, num_ranks, False)
    for rank, found in enumerate(seen):
        assert found["before"] == [None] * len(ANSWERS) and "before the answer is graded" in found["too early"]
        assert found["asked"] == ANSWERS[rank::num_ranks]
        assert found["after"] == [True, False, False, True, True]


def test_what_grading_fails_at_is_raised_where_it_is_settled_and_told_to_the_others() -> None:
    first, second = run_ranks(graded_beside, 2, True)
    assert first["error"].startswith("OSError") and "No space left" in first["error"]
    assert second["error"].startswith("PeerFailedError: another process failed: OSError")
    assert first["after"] == second["after"] == [None] * len(ANSWERS)
