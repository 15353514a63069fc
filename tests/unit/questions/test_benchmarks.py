"""Each benchmark asks, extracts and grades as its authors mean it; the gold answers of the real sets are accepted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from tango_hpc.base.config.schema import TAGGED, ProtocolConfig
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.questions import benchmarks
from tango_hpc.questions.benchmarks import processbench
from tango_hpc.questions.benchmarks.processbench import first_wrong_step
from tango_hpc.questions.data.prepare.pipeline import prepare
from tango_hpc.questions.data.prepare.rows import SCHEMA
from tango_hpc.questions.data.tables import read_rows
from tango_hpc.questions.grading import GradingPool, mathematics
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.tasks import get_task
from tango_hpc.questions.tasks.evaluated import BenchmarkTask
from tests.helpers.real_data import REAL, needs_real_data
from tools.grader_acceptance import measure


@pytest.fixture(scope="module")
def pool():
    with GradingPool(1) as pool:
        yield pool


def row(source: str, question: str = "q", answer: str = "1", **metadata) -> dict:
    return {"id": "x", "question": question, "answer": answer, "source": source, "metadata": json.dumps(metadata)}


def right(pool, name: str, one: dict, response: str) -> bool:
    benchmark = benchmarks.get_benchmark(name)
    answer = benchmark.extract(parse_solution(response))
    return answer is not None and pool.grade([benchmark.grade(one, answer)])[0].correct


def test_an_unknown_benchmark_is_named_with_the_valid_ones():
    with pytest.raises(ValueError, match="no benchmark 'math5000'; there are math500"):
        benchmarks.get_benchmark("math5000")


def test_the_answer_of_our_format_comes_before_any_other_box():
    def extract(text: str) -> str | None:
        return benchmarks.get_benchmark("math500").extract(parse_solution(text))

    assert extract(r"<think><step>\boxed{1}</step></think><answer>\boxed{2}</answer> or \boxed{3}") == "2"
    assert extract(r"So it is \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert extract("no box at all") is None


def test_training_and_evaluation_read_one_answer_from_a_response(pool):
    """A box anywhere counts, in every task and benchmark alike; before, training wanted it in the answer element."""
    responses = [
        r"So \boxed{te}.",
        r"\boxed{a}<answer>\boxed{te}</answer>",
        "<answer>te</answer>",
        r"\boxed{a} \boxed{te",
    ]
    tasks = [
        get_task(TaskConfig(name="math")),
        get_task(TaskConfig(name="last_letter")),
        BenchmarkTask(benchmarks.get_benchmark("gsm8k"), pool),
    ]
    for task in tasks:
        assert [task.answer(parse_solution(response)) for response in responses] == ["te", "te", None, None]


def test_olympiadbench_uses_unit_tolerance_and_number_of_answers(pool):
    several = row("olympiadbench", answer="100,200", several=True)
    assert right(pool, "olympiadbench", several, r"\boxed{200, 100}")
    assert not right(pool, "olympiadbench", several, r"\boxed{100200}")
    assert right(pool, "olympiadbench", row("olympiadbench", answer="4.2", error="1e-1"), r"\boxed{4.25}")
    assert not right(pool, "olympiadbench", row("olympiadbench", answer="4.2"), r"\boxed{4.25}")
    assert not right(pool, "olympiadbench", row("olympiadbench", answer="3", unit="km"), r"\boxed{3\text{ m}}")
    statement = benchmarks.get_benchmark("olympiadbench").statement
    assert "separated by commas" in statement(several) and "km" in statement(row("olympiadbench", unit="km"))


@pytest.mark.parametrize(
    "gold, several",
    [("$1$, $\\frac{1}{2}$", True), ("$-2,3$", True), ("$(1,2)$", False), ("$2^{1,5}$", False)],
)
def test_olympiadbench_answers_are_several_by_their_commas_where_the_mirror_does_not_say(gold, several):
    benchmark, question = benchmarks.get_benchmark("olympiadbench"), row("olympiadbench", answer=gold)
    assert ("separated by commas" in benchmark.statement(question)) == several
    assert benchmark.grade(question, "x").options["several"] == several
    told = row("olympiadbench", answer=gold, several=not several)
    assert benchmark.grade(told, "x").options["several"] != several


def test_cruxeval_answers_may_hold_braces_that_do_not_pair_up(pool):
    one = row("cruxeval", "def f(x):\n    return x\n\nf('}')", "'}'")
    assert right(pool, "cruxeval", one, r"<think><step>s</step></think><answer>\boxed{'}'}</answer>")
    assert not right(pool, "cruxeval", one, r"<answer>\boxed{'{'}</answer>")
    statement = benchmarks.get_benchmark("cruxeval").statement(one)
    assert "```python\ndef f(x):\n    return x\n```" in statement and "`f('}')`" in statement


@pytest.mark.parametrize(
    "name, gold, wrong",
    [
        ("boardgameqa", "Uncertain", "True"),
        ("boardgameqa", "False", "proved"),
        ("strategyqa", "True", "False"),
        ("strategyqa_plain", "yes", "no"),
    ],
)
def test_labels_are_asked_for_and_compared(pool, name, gold, wrong):
    one = row(name, answer=gold)
    assert gold in benchmarks.get_benchmark(name).statement(one)
    assert right(pool, name, one, rf"<answer>\boxed{{\text{{{gold.title()}}}}}</answer>")
    assert not right(pool, name, one, rf"\boxed{{{wrong}}}")


def test_labels_of_other_words_count_as_those_that_they_mean(pool):
    game = row("boardgameqa", answer="False")
    assert [right(pool, "boardgameqa", game, rf"\boxed{{{word}}}") for word in ("disproved", "No", "unknown", "false it is")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert right(pool, "boardgameqa", row("boardgameqa", answer="unknown"), r"\boxed{Uncertain}")  # prepared before
    assert right(pool, "strategyqa", row("strategyqa", answer="True"), r"\boxed{yes}")


@pytest.mark.parametrize(
    "gold, answer, correct",
    [
        ("'ab c'", "ab c", True), ("'ab c'", '"ab c"', True), ("'ab c'", "abc", False), ("''", "''", True),
        ("''", " ", False), ("True", "1", True), ("[1, 2.0]", "[1.0,2]", True), ("[1, 2]", "(1, 2)", False),
        ("'1'", "1", False), ("{1: 'a'}", "{1:'a'}", True), ("{1, 2}", "{2, 1}", True), ("4", "2+2", False),
        ("[]", "__import__('os').getcwd()", False), ("1", "(" * 5000, False),
    ],
)  # fmt: skip
def test_cruxeval_compares_by_value_and_takes_strings_without_quotes(pool, gold, answer, correct):
    benchmark = benchmarks.get_benchmark("cruxeval")
    verdict = pool.grade([benchmark.grade(row("cruxeval", "def f():\n    ...\n\nf()", gold), answer)])[0]
    assert verdict.correct == correct


@pytest.mark.parametrize(
    "judgements, prediction", [([1, 1, 1], -1), ([1, -1, 1], 1), ([-1, 0], 0), ([1, 0, -1], None), ([0], None)]
)
def test_processbench_predictions(judgements, prediction):
    assert first_wrong_step(judgements) == prediction


def test_processbench_solutions_become_solutions_of_our_format():
    one = row("processbench", steps=["First, $1+1=2$.", r"So \boxed{2}."])
    for solution in (
        parse_solution(processbench.solution(one, TAGGED).shown),
        processbench.solution(one, ProtocolConfig(solution="free")),
    ):
        assert solution.well_formed and solution.answer == "2"
        assert [step.text for step in solution.steps] == ["First, $1+1=2$.", r"So \boxed{2}."]
    assert solution.shown == "Step 1:\nFirst, $1+1=2$.\n\nStep 2:\nSo \\boxed{2}."


def test_processbench_solutions_without_a_box_have_no_answer_element():
    question = row("processbench", steps=["First, $1+1=2$.", "So there are 2."])
    shown = processbench.solution(question, TAGGED).shown
    assert shown == "<think>\n<step>First, $1+1=2$.</step>\n<step>So there are 2.</step>\n</think>"


@needs_real_data
def test_no_real_processbench_solution_has_an_empty_box(tmp_path):
    prepare("processbench", source=str(REAL / "processbench"), out=tmp_path / "rows.parquet")
    texts = [
        processbench.solution(question, TAGGED).shown
        for question in read_rows(tmp_path / "rows.parquet", tuple(SCHEMA.names))
    ]
    assert not [text for text in texts if "\\boxed{}" in text.partition("<answer>")[2]]
    assert sum("<answer>" not in text for text in texts) == 62 + 139  # of GSM8K's 400 and MATH's 1,000


def test_the_math_task_grades_each_row_by_its_source():
    task = get_task(TaskConfig(name="math"))
    answers = [
        (row("eurus_rl", answer=r"\frac{1}{2}"), "0.5"),
        (row("gsm8k", answer="1,002"), r"\$1002"),
        (row("gsm8k", answer="8"), r"2^3"),  # GSM8K wants a number
        (row("math", answer="8"), r"2^3"),
        (row("strategyqa", answer="yes"), "Yes"),
        (row("somebody_elses", answer="x+1"), "1+x"),
        (row("math", answer="8"), None),
    ]
    answers[5][0].pop("metadata")  # a file of the user's own has four columns
    assert [grade.correct for grade in task.grade_all(answers)] == [True, True, False, True, True, True, False]
    assert task.label_all([(answers[0][0], [])]) == [None]


def test_tasks_and_benchmarks_load_no_heavy_library():
    code = (
        "import sys, tango_hpc.questions.tasks.math, tango_hpc.questions.benchmarks as b; [b.get_benchmark(n) for n in"
        " b.NAMES]; print([m for m in ('torch', 'vllm', 'megatron', 'transformers', 'sympy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@needs_real_data
@pytest.mark.parametrize("name", ["math500", "olympiadbench", "gsm8k", "amc23", "aime24"])
@pytest.mark.parametrize("use_text", [True, False], ids=["as written", "as mathematics only"])
def test_the_gold_answers_of_real_sets_are_accepted(name, use_text, pool, tmp_path, monkeypatch):
    """Also where equal text decides nothing, so that every answer is really read: then in this process."""
    prepare(name, source=str(REAL / name), out=tmp_path / "rows.parquet")
    rows = read_rows(tmp_path / "rows.parquet", tuple(SCHEMA.names))
    if use_text:
        result = measure(name, rows, pool)
        assert result.share >= 0.995, result.failures
        return
    count = itertools.count()
    monkeypatch.setattr(mathematics, "spelling", lambda text: f"{text} {next(count)}")
    benchmark = benchmarks.get_benchmark(name)
    items = [benchmark.grade(one, one["answer"]) for one in rows]
    rejected = [item for item in items if item.rule == "math" and not mathematics.same_answer(item.gold, item.answer, **item.options)]  # fmt: skip
    assert len(rejected) <= 0.005 * len(items), rejected
