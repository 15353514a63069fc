"""The shipped task of addition: its rows, and labels of steps against arithmetic."""

from __future__ import annotations

import itertools

import pytest

from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.questions.grading.pool import GradingPool
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.questions.tasks import get_task
from tango_hpc.questions.tasks.addition import Addition
from tango_hpc.stages.stage import SFT
from tests.helpers.runs import small_config

QUESTION = {"question": "487+256", "answer": "743"}
RIGHT = ["7+6+0=13:3", "8+5+1=14:43", "4+2+1=7:743"]


@pytest.mark.parametrize(
    "steps, labels",
    [
        (RIGHT, [1, 1, 1]),
        (["7+6+0=14:4", "8+5+1=14:44", "4+2+1=7:744"], [-1, 1, 1]),  # each judged by what the one before says
        (["7+6+0=3:3", "8+5+1=14:43", "4+2+1=7:743"], [-1, -1, 1]),  # two wrong steps, and the answer is right
        (["7+6+0=3:3", "8+5+0=13:33", "4+2+1=7:733"], [-1, 1, 1]),
        (["so far so good", "8+5+1=14:43", "4+2+1=7:743"], [-1, 1, 1]),
        ([*RIGHT, "0+0+0=0:0743"], [1, 1, 1, -1]),
        (["7+6+0=13:13", "", "9" * 5000], [-1, -1, -1]),
    ],
)
def test_a_step_is_judged_by_its_column_and_the_carry_that_it_was_given(steps, labels):
    assert Addition().label_steps(QUESTION, steps) == labels


def test_the_teachers_write_what_the_labels_and_sums_say():
    task = Addition(digits=(1, 5), slip=0.5, verifier_slip=0.0, rows=300)
    wrong = 0
    for row in task.verifications(seed=1):
        solution = parse_solution(row["solution_text"])
        labels = task.label_steps(row, [step.text for step in solution.steps])
        read = read_verification(row["verification_text"], solution, "authors")
        assert solution.well_formed and read.judgements == labels
        assert read.final == (1 if -1 not in labels else 0)
        is_right = solution.answer == str(sum(map(int, row["question"].split("+"))))
        assert is_right or -1 in labels  # no label that lets a wrong answer through
        wrong += not is_right
        assert (
            not is_right or -1 not in labels
        )  # a teacher's slip stays in the answer; a model's may be made good again
    assert wrong > 100


def test_slips_are_as_often_as_asked_and_the_first_judgements_are_careful():
    task = Addition(slip=0.3, verifier_slip=0.25, careful=0.5, rows=2000)
    flipped = []
    for row in task.verifications(seed=0):
        solution = parse_solution(row["solution_text"])
        labels = task.label_steps(row, [step.text for step in solution.steps])
        judgements = read_verification(row["verification_text"], solution, "authors").judgements
        flipped.append([a != b for a, b in zip(labels, judgements, strict=True)])
    assert not any(itertools.chain(*flipped[:1000]))
    careless = [*itertools.chain(*flipped[1000:])]
    assert sum(careless) / len(careless) == pytest.approx(0.25, abs=0.03)


def test_it_is_shipped_by_its_name_and_graded_in_workers(tmp_path):
    config = small_config(tmp_path / "run", "task={name: addition, settings: {digits: [1, 2], rows: 64}}",
                          "generator.model.build.characters=0123456789+=")  # fmt: skip
    SFT.check_inputs(config)
    with GradingPool(num_workers=1) as pool:
        task = get_task(TaskConfig(name="addition"))
        task.pool = pool
        verdicts = task.grade_all([(QUESTION, " 743 "), (QUESTION, "733"), (QUESTION, None)])
        assert [verdict.correct for verdict in verdicts] == [True, False, False]
        steps = parse_solution("<think>" + "".join(f"<step>{text}</step>" for text in RIGHT) + "</think>").steps
        assert task.label_all([(QUESTION, steps)]) == [[1, 1, 1]]
