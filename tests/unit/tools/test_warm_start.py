"""tools/warm_start.py: easy questions, and fine-tuning data from a model's own answers, in the form that is
trained on.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tango_hpc.commands.cli import app
from tango_hpc.questions.benchmarks.records import Answer, write_answers
from tango_hpc.questions.protocol.verification import parse_verification

TOOL = Path(__file__).parents[3] / "tools/warm_start.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("warm_start", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def solution(*steps: str, answer: str) -> str:
    inside = "\n".join(f"<step>{step}</step>" for step in steps)
    return f"<think>\n{inside}\n</think>\n<answer>\\boxed{{{answer}}}</answer>"


@pytest.mark.parametrize(
    ("step", "words", "fits"),
    [
        ("4 pens cost 4 * 3 = 12 dollars.", "4 * 3 = 12.", True),
        ("That is $1,200 / 4 = $400.", "1200 / 4 is not 400.", False),
        ("A third of it is 10 / 3 = 3.33, and (3 + 4) * 2 = 14.", "10 / 3 = 3.33. (3 + 4) * 2 = 14.", True),
        ("3 sets of 15 make 45.", "Nothing to calculate.", True),
        ("Nonsense: 3 / 0 = 1 and 2 ** 3 = 9.", "Nothing to calculate.", True),
    ],
)
def test_the_calculations_of_a_step_are_done_again(tool: ModuleType, step: str, words: str, fits: bool) -> None:
    assert tool.check(step) == (words, fits)


@pytest.mark.parametrize(
    ("steps", "correct", "judgements"),
    [
        (("2 * 3 = 6.", "6 + 1 = 7."), True, [1, 1]),
        (("2 * 3 = 5.", "5 + 1 = 6."), False, [-1, 1]),
        (("2 * 3 = 6.", "6 + 1 = 7."), False, [1, -1]),  # all comes out, and yet the answer is wrong
    ],
)
def test_a_verification_keeps_the_whole_form(
    tool: ModuleType, steps: tuple[str, ...], correct: bool, judgements: list[int]
) -> None:
    read = parse_verification(tool.verification(solution(*steps, answer="7"), correct), len(steps), "graded")
    assert (read.judgements, read.final, read.problems) == (judgements, int(correct), [])
    assert parse_verification(tool.verification(solution(*steps, answer="7"), correct), 2).format_reward == 1.0


def test_rows_are_right_solutions_and_balanced_checks(tmp_path: Path) -> None:
    right, wrong = solution("2 + 2 = 4.", answer="4"), solution("2 + 2 = 5.", answer="5")
    given = [("a", 0, right, True), ("a", 1, right, True), ("a", 2, wrong, False), ("b", 0, "4", True)]
    given += [("b", 1, solution("4 = 4.", answer="4"), True)]
    answers = [
        Answer(question, f"question {question}", "4", sample, text, 9, True, text.startswith("<think>"), "4", correct)
        for question, sample, text, correct in given
    ]
    write_answers(tmp_path / "task.parquet", answers)
    subprocess.run([sys.executable, TOOL, "rows", tmp_path / "task.parquet", "--out", tmp_path / "out"], check=True)
    solutions = pq.read_table(tmp_path / "out/generator.parquet").to_pylist()
    assert [(row["question"], row["solution_text"]) for row in solutions] == [
        ("question a", right),
        ("question b", solution("4 = 4.", answer="4")),
    ]
    checks = pq.read_table(tmp_path / "out/verifier.parquet").to_pylist()
    assert [(row["question"], row["solution_text"]) for row in checks] == [("question a", right), ("question a", wrong)]


def test_easy_questions_are_those_of_few_calculations_and_the_file_says_how_it_was_made(tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(
        '{"question": "one", "answer": "<<1+1=2>>2\\n#### 2"}\n'
        '{"question": "three", "answer": "<<1+1=2>>2 <<2+1=3>>3 <<3+1=4>>4\\n#### 4"}\n'
        '{"question": "none", "answer": "so\\n#### 4"}\n'
    )
    whole, easy = tmp_path / "all.parquet", tmp_path / "x/easy.parquet"
    made = CliRunner().invoke(app, ["data", "gsm8k", "--split", "test", "--source", str(source), "--out", str(whole)])
    assert made.exit_code == 0, made.output
    subprocess.run([sys.executable, TOOL, "easy", whole, "--out", easy], check=True)
    before, after = pq.read_table(whole), pq.read_table(easy)
    assert after["question"].to_pylist() == ["one"]
    assert after.schema.metadata == before.schema.metadata and b"tango_hpc.made_with" in after.schema.metadata


def test_another_file_is_a_mistake_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no table")
    run = [sys.executable, TOOL, "rows", tmp_path / "text.parquet", "--out", tmp_path / "out"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "text.parquet is no file of this kind" in done.stderr
    assert "Traceback" not in done.stderr
