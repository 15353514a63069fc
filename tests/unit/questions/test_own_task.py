"""A task of the user's own: its rows, its grading and labels in workers, and how mistakes in it are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import UserError
from tango_hpc.questions.data.tables import read_rows, write_rows
from tango_hpc.questions.grading.own_code import own_task
from tango_hpc.questions.grading.pool import GradingPool
from tango_hpc.questions.protocol.solution import parse_solution
from tango_hpc.questions.tasks import get_task
from tango_hpc.questions.tasks.made_files import check_made_files, make_missing_files
from tango_hpc.questions.tasks.own import OwnTask, check_own_task
from tango_hpc.stages.stage import SFT
from tests.helpers.own_task import PAGE, write_what_the_page_shows
from tests.helpers.runs import small_config

DOUBLE = '''
class Double:
    """Doubling a number, in one step."""

    def __init__(self, rows=4):
        self.rows = rows

    def questions(self, split, seed):
        for number in range(self.rows):
            yield {"question": str(number + 2 * (split == "eval")), "answer": str(2 * number + 4 * (split == "eval"))}

    def grade(self, question, answer):
        return answer == question["answer"]

    def label_steps(self, question, steps):
        return [1 if step == question["answer"] else -1 for step in steps]

    def solutions(self, seed):
        yield {"question": "3", "solution_text": r"<think><step>6</step></think><answer>\\boxed{6}</answer>"}

    def verifications(self, seed):
        yield {
            "question": "3",
            "solution_text": r"<think><step>6</step></think><answer>\\boxed{6}</answer>",
            "verification_text": r"<step_verification><step>6\\boxed{CORRECT}</step></step_verification>"
            r"<final_verification>\\boxed{CORRECT}</final_verification>",
        }
'''


def own(folder: Path, code: str = DOUBLE, *overrides: str) -> Config:
    """The small run with the task that `code` is."""
    file = folder / "double.py"
    file.write_text(code)
    return small_config(folder / "run", f"task={{name: {file}}}", *overrides)


def changed(line: str, to: str) -> str:
    assert DOUBLE.count(line) == 1, line
    return DOUBLE.replace(line, to)


def test_the_class_makes_the_files_that_are_missing(tmp_path: Path) -> None:
    config = own(tmp_path)
    make_missing_files(config)
    columns = ("id", "question", "answer", "source")
    # 2 and 3 are asked in the evaluation, and so not in training.
    train, held_out = read_rows(config.data.train, columns), read_rows(config.data.eval, columns)
    assert [(row["question"], row["answer"]) for row in train] == [("0", "0"), ("1", "2")]
    assert [row["question"] for row in held_out] == ["2", "3", "4", "5"]
    assert train[0]["id"] == f"double-train-{config.seed}-0" and train[0]["source"] == "double"
    assert read_rows(config.sft.generator.data, ("question", "solution_text"))[0]["question"] == "3"
    assert check_made_files(config) == []


def test_a_file_made_by_other_code_or_settings_is_told(tmp_path: Path) -> None:
    config = own(tmp_path)
    make_missing_files(config)
    (tmp_path / "double.py").write_text(DOUBLE + "\n# another version\n")
    problems = check_made_files(config)
    assert len(problems) == 4 and "code" in problems[0] and "remove the file" in problems[0]
    (tmp_path / "double.py").write_text(DOUBLE)
    assert "rows" in check_made_files(own(tmp_path, DOUBLE, "task.settings={rows: 5}"))[0]


def test_grading_and_labels_are_those_of_the_class(tmp_path: Path) -> None:
    pool = GradingPool(num_workers=1)
    task = OwnTask(own(tmp_path).task, pool)
    row = {"question": "3", "answer": "6"}
    assert [verdict.correct for verdict in task.grade_all([(row, "6"), (row, "7"), (row, None)])] == [
        True,
        False,
        False,
    ]
    steps = parse_solution("<think><step>6</step><step>7</step></think>").steps
    assert task.label_all([(row, steps), (row, [])]) == [[1, -1], []]
    unlabelled = own(tmp_path, DOUBLE.replace("def label_steps", "def _label_steps"))
    pool.close()
    assert get_task(unlabelled.task).label_all([(row, steps)]) == [None]


SCORED = changed(
    '        return answer == question["answer"]\n\n    def label',
    """        value = float(answer or "nan")
        if value == int(question["answer"]):
            return 1.0
        return max(0.0, 0.5 - abs(value - int(question["answer"])) / 10), {"near": 0.5, "length": len(answer)}

    def label""",
)


@pytest.mark.parametrize(("threshold", "right"), [(1.0, [True, False, False]), (0.4, [True, True, False])])
def test_a_class_may_score_answers(tmp_path: Path, threshold: float, right: list[bool]) -> None:
    task = OwnTask(own(tmp_path, SCORED + f"\n    threshold = {threshold}\n").task, GradingPool(num_workers=1))
    row = {"question": "3", "answer": "6"}
    verdicts = task.grade_all([(row, "6"), (row, "7"), (row, "9")])
    assert [verdict.reward for verdict in verdicts] == pytest.approx([1.0, 0.4, 0.2])
    assert [verdict.correct for verdict in verdicts] == right
    assert [verdict.parts for verdict in verdicts] == [{}, *[{"near": 0.5, "length": 1.0}] * 2]
    (missing,) = task.grade_all([(row, None)])
    assert (missing.reward, missing.correct, missing.parts) == (0.0, False, {})
    task.pool.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1.5", r"grade gave 1.5; it must give True or False, or a score from 0 to 1"),
        ("float('nan')", r"grade gave nan; it must give"),
        ("'yes'", r"grade gave 'yes'; it must give"),
        ("(0.5,)", r"grade gave \(0.5,\); it must give"),
        ("0.5, {'a': None}", r"grade gave the parts {'a': None}; they must be a dictionary of names and finite"),
        ("0.5, {1: 0.5}", r"grade gave the parts {1: 0.5}"),
        ("0.5, 0.5", r"grade gave the parts 0.5"),
    ],
)
def test_a_score_that_is_none_is_told(tmp_path: Path, given: str, message: str) -> None:
    code = changed('return answer == question["answer"]', f"return {given}")
    with pytest.raises(UserError, match=message):
        check_own_task(own(tmp_path, code))


def test_the_file_may_have_dataclasses_and_is_read_anew_after_a_change(tmp_path: Path) -> None:
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Task:\n"
        "    right: str = 'a'\n\n    def grade(self, question, answer):\n        return answer == self.right\n"
    )
    file = tmp_path / "task.py"
    for right in "ab":  # as many bytes, perhaps at the same moment
        file.write_text(code.replace("'a'", f"'{right}'"))
        assert own_task(str(file), {}).right == right
    assert own_task(str(file), {"right": "c"}).right == "c"
    assert not (tmp_path / "__pycache__").exists()


def test_a_run_grades_by_the_file_as_it_was_when_the_run_began(tmp_path: Path) -> None:
    config = own(tmp_path)
    row = {"question": "3", "answer": "6"}
    with GradingPool(num_workers=1) as pool:
        task = OwnTask(config.task, pool)
        assert task.grade_all([(row, "6")])[0].correct
        file = Path(config.task.name)
        file.write_text(changed('return answer == question["answer"]', "return False"))
        assert task.grade_all([(row, "6"), (row, "6 ")])[0].correct
        file.unlink()
        assert task.grade_all([(row, "7"), (row, "6")])[1].correct


def test_answers_are_one_in_a_vote_where_they_are_spelled_alike(tmp_path: Path) -> None:
    """Such as in a game of numbers: `grade` calls each way to the goal right, whatever the reference is."""
    with GradingPool(num_workers=1) as pool:
        task = OwnTask(own(tmp_path, changed('return answer == question["answer"]', "return True")).task, pool)
        row = {"question": "3", "answer": "6"}
        assert task.grade_all([(row, "4*5")])[0].correct
        assert task.same_all([(row, "4*5", "5*4"), (row, "4*5", "4*5")]) == [False, True]


def test_grade_sees_the_metadata_of_a_file_of_questions(tmp_path: Path) -> None:
    code = changed('return answer == question["answer"]', 'return question["metadata"] == "{}" and answer == "6"')
    files = {split: tmp_path / f"{split}.parquet" for split in ("train", "eval")}
    for split, file in files.items():
        write_rows(file, [{"id": split, "question": "3", "answer": "6", "source": "mine", "metadata": "{}"}])
    overrides = (f"data.train={files['train']}", f"data.eval={files['eval']}")
    check_own_task(own(tmp_path, code.replace("def questions", "def _questions"), *overrides))


def test_questions_that_never_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tango_hpc.questions.tasks.own._MOST_ROWS", 1000)
    endless = own(tmp_path, changed("for number in range(self.rows)", "for number in itertools.count()"))
    Path(endless.task.name).write_text("import itertools\n" + Path(endless.task.name).read_text())
    with pytest.raises(UserError, match=r"double\.py: questions gave more than 1,000 rows; does it end\?"):
        check_own_task(endless)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{start: 2024-01-01}", "Object of type date is not JSON serializable: put a date in quotes"),
        ("{of: {1: a}}", "keys must be text: put them in quotes"),
        ("{of: {1: a, x: b}}", "must hold text, numbers"),
        ("{limit: .inf}", "Out of range float values are not JSON compliant"),
    ],
)
def test_settings_are_what_a_file_can_hold(tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        own(tmp_path, DOUBLE, f"task.settings={settings}")


def test_what_the_class_breaks_costs_one_answer_and_is_named(tmp_path: Path) -> None:
    code = changed(
        'return answer == question["answer"]', 'return 1 / int(answer) == 1 if answer != "for ever" else forever()'
    )
    code = changed_more(code, "class Double:", "def forever():\n    while True:\n        pass\n\n\nclass Double:")
    code = changed_more(code, "if step ==", "if 1 / int(step) and step ==")
    config = own(tmp_path, code)
    with GradingPool(1, time_limit_seconds=0.5) as pool:
        task = OwnTask(config.task, pool)
        row = {"question": "1", "answer": "2"}
        verdicts = task.grade_all([(row, answer) for answer in ("1", "0", "for ever", "2")])
        assert [(verdict.correct, verdict.outcome) for verdict in verdicts] == [
            (True, "graded"), (False, "error"), (False, "time"), (False, "graded"),
        ]  # fmt: skip
        line = next(number for number, text in enumerate(code.splitlines(), 1) if "1 / int(answer)" in text)
        assert verdicts[1].error == f"{config.task.name}, line {line}, in grade: ZeroDivisionError: division by zero"
        steps = parse_solution("<think><step>0</step></think>").steps
        assert task.label_all([(row, steps), (row, [])]) == [None, []]
        assert "in label_steps: ZeroDivisionError" in task.complaints[0] or "<listcomp>" in task.complaints[0]


def changed_more(code: str, text: str, to: str) -> str:
    assert code.count(text) == 1, text
    return code.replace(text, to)


MISTAKES = {
    "a syntax error": (changed("def grade(self, question, answer):", "def grade(self, question, answer)"), "line 12: SyntaxError"),
    "an import": ("import no_such_module\n" + DOUBLE, "line 1, in <module>: ModuleNotFoundError"),
    "no class": ("", "one class with a method `grade`; it has none"),
    "two classes": (DOUBLE + "\nclass Other:\n    def grade(self): pass\n", "it has Double, Other"),
    "its own exit": ("raise SystemExit(3)\n" + DOUBLE, "line 1, in <module>: SystemExit: 3"),
    "rows that are none": (changed('"answer": str(', '"reply": str('), "row 0 of questions"),
    "more than is kept": (changed('yield {"question": str(', 'yield {"tests": [], "question": str('), "row 0 of questions has 'tests' beside"),
    "the same questions in both splits": (changed('"question": str(number + 2 * (split == "eval"))', '"question": str(number)'), "give each split questions of its own"),
    "a generator that fails": (changed("for number in range(self.rows):", "for number in range(self.row):"), "line 9, in questions: AttributeError"),
    "an answer that is a number": (changed('"answer": str(2 * number + 4 * (split == "eval"))', '"answer": 2'), "row 0 of questions"),
    "a reference called wrong": (changed('return answer == question["answer"]', "return False"), "grade calls it wrong"),
    "no truth value": (changed('return answer == question["answer"]', "return answer"), "it must give True or False"),
    "an empty answer": (changed('return answer == question["answer"]', 'return int(answer) == int(question["answer"])'), "in grade: ValueError"),
    "labels of other steps": (changed("for step in steps]", "for step in steps[:1]]"), "label_steps gave"),
    "steps that models write": (changed("1 if step == question", "1 if int(step) > 0 == question"), "ValueError"),
    "a solution without the form": (changed('"solution_text": r"<think><step>6</step></think><answer>\\boxed{6}</answer>"}', '"solution_text": "6"}'), "does not keep the form"),
    "a verification without a verdict": (changed(r"<final_verification>\boxed{CORRECT}</final_verification>", ""), "verification_text"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_place_before_anything_starts(tmp_path: Path, name: str) -> None:
    code, message = MISTAKES[name]
    config = own(tmp_path, code)
    with pytest.raises(UserError) as raised:
        SFT.check_inputs(config)
    assert str(tmp_path / "double.py") in str(raised.value) and message in str(raised.value)
    assert not config.data.train.exists()


def test_settings_and_the_file_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task.settings: .*unexpected keyword argument 'row'"):
        SFT.check_inputs(own(tmp_path, DOUBLE, "task.settings={row: 5}"))
    with pytest.raises(UserError, match="task.settings: given, but task.name is math"):
        small_config(tmp_path / "run", "task={name: math, settings: {rows: 1}}")
    with pytest.raises(UserError, match="must be addition, last_letter, math or the path of a Python file"):
        small_config(tmp_path / "run", "task={name: chess}")
    with pytest.raises(UserError, match="no file at .*missing.py"):
        SFT.check_inputs(small_config(tmp_path / "run", f"task={{name: {tmp_path}/missing.py}}"))


def test_the_page_shows_a_task_that_passes_and_the_message_of_a_mistake_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, settings = write_what_the_page_shows(tmp_path)
    assert len((code + settings).splitlines()) < 100
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("odd_digits.yaml"))
    SFT.check_inputs(config)
    row, steps = {"question": "385", "answer": "2"}, ["385:1", "85:1", "5:2"]
    odd_digits = own_task(str(tmp_path / "odd_digits.py"), config.task.settings)
    assert odd_digits.label_steps(row, steps) == [1, 1, 1]
    assert odd_digits.label_steps(row, ["385:1", "85:2", "5:3", "3"]) == [1, -1, 1, -1]
    quoted = re.search(r"^tango: .*(/odd_digits\.py, line .*)$", PAGE, re.MULTILINE)
    assert quoted is not None
    (tmp_path / "odd_digits.py").write_text(
        code.replace('strip() == question["answer"]', 'strip() == question["anwser"]')
    )
    with pytest.raises(UserError) as raised:
        SFT.check_inputs(config)
    assert quoted[1] in str(raised.value)
