"""A task that is one class in one file, the user's own or one shipped like it: questions, grading, labels and
fine-tuning data as the class has them (docs/your_own_task.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tango_hpc.base.config import Config
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.user_code import mistakes_in, read_source
from tango_hpc.questions.data.tables import SFT_COLUMNS, read_questions, write_rows
from tango_hpc.questions.grading.own_code import own_task
from tango_hpc.questions.grading.pool import GradeItem, GradingPool, NoWorker
from tango_hpc.questions.protocol.forms import read_solution
from tango_hpc.questions.protocol.solution import Step
from tango_hpc.questions.protocol.verification import read_verification
from tango_hpc.questions.tasks.math import Math

Kind = Literal["questions", "solutions", "verifications"]  # methods of the class that make rows
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "questions": ("question", "answer"),
    "solutions": SFT_COLUMNS["generator"],
    "verifications": SFT_COLUMNS["verifier"],
}
_CHECKED_ROWS = 8  # of each file, before a run begins
_MOST_ROWS = 1_000_000  # of a file that the class makes


class OwnTask(Math):
    """Grades and labels by the file's class, in worker processes: what that breaks costs one answer, not the run."""

    def __init__(self, settings: TaskConfig, pool: GradingPool | None = None) -> None:
        super().__init__(pool)
        self.name = Path(settings.name).stem
        file = _file(settings)
        # A copy of the file as it is now: a later edit changes the next run alone.
        self._called: dict[str, Any] = {"file": file, "source": read_source(file), "settings": settings.settings}
        self._has_labels = hasattr(own_task(**self._called), "label_steps")
        self.complaints: Sequence[str] = ()

    def item(self, row: Mapping[str, Any], answer: str) -> GradeItem:
        """Return graded by the class's `grade`."""
        return GradeItem("own", row["answer"], answer, {**self._called, "question": row})

    def label_all(self, solutions: Sequence[tuple[dict[str, Any], Sequence[Step]]]) -> list[list[int] | None]:
        """Return the labels of `label_steps` for each solution; None where it fails: `complaints` has the first
        failure.
        """
        if not self._has_labels:
            return super().label_all(solutions)
        verdicts = self.pool.grade(
            GradeItem("own_steps", "", "", {**self._called, "question": row, "steps": [step.text for step in steps]})
            for row, steps in solutions
        )
        failed = [verdict for verdict in verdicts if verdict.outcome != "graded"]
        if failed and not self.complaints:
            self.complaints = (failed[0].error or f"label_steps: {failed[0].outcome}",)
        return [verdict.labels for verdict in verdicts]

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return nothing: the file's own code grades, whatever the source."""
        return []

    def same_all(self, pairs: Sequence[tuple[dict[str, Any], str, str]]) -> list[bool]:
        """Compare by spelling: `grade` need not compare answers, and may call two different ones right."""
        return [first == second for _, first, second in pairs]


@dataclass(frozen=True)
class OwnRecipe:
    """A file that the class makes."""

    task: TaskConfig
    kind: Kind
    seed: int
    split: Literal["train", "eval"] | None = None

    def made_with(self) -> dict[str, Any]:
        """Return all that the rows depend on; JSON."""
        made: dict[str, Any] = {"task": Path(self.task.name).name, "settings": self.task.settings}
        made |= {"kind": self.kind, "seed": self.seed}
        if self.task.is_own:
            made["code"] = hashlib.sha256(Path(_file(self.task)).read_bytes()).hexdigest()[:16]
        return made if self.split is None else made | {"split": self.split}

    def rows(self, limit: int | None = None) -> list[dict[str, str]]:
        """Return the rows that the class gives, the first `limit` of them; a training question that is also held out is
        left out. Raises `UserError` for a row that is none.
        """
        if self.kind != "questions":
            return list(islice(self._given(self.split), limit))
        held_out = {row["question"] for row in self._given("eval")} if self.split == "train" else set()
        name = Path(self.task.name).stem
        given = enumerate(self._given(self.split))
        asked = islice(((number, row) for number, row in given if row["question"] not in held_out), limit)
        made = [{"id": f"{name}-{self.split}-{self.seed}-{number}", **row, "source": name} for number, row in asked]
        if not made and held_out:
            raise UserError(
                f"{_file(self.task)}: questions gives nothing for the split 'train' that it does not give for 'eval'"
                " too, and what is held out is not trained on; give each split questions of its own"
            )
        return made

    def write(self, path: Path) -> None:
        """Make the rows and write them, whole or not at all."""
        rows = self.rows()
        if not rows:
            raise UserError(f"{_file(self.task)}: {self.kind} gave no rows for {path}")
        write_rows(path, rows, made_with=self.made_with())

    def _given(self, split: str | None) -> Iterator[dict[str, str]]:
        file = _file(self.task)
        with mistakes_in(file):
            method = getattr(own_task(file, self.task.settings), self.kind)
            rows: Iterable[Mapping[str, Any]] = method(split, self.seed) if split is not None else method(self.seed)
            for number, row in enumerate(rows):
                if number == _MOST_ROWS:
                    raise UserError(
                        f"{file}: {self.kind} gave more than {_MOST_ROWS:,} rows; does it end? (More questions than "
                        "these come from a Parquet file.)"
                    )
                texts = {column: _text(file, self.kind, number, row, column) for column in COLUMNS[self.kind]}
                if self.kind == "questions" and (more := ", ".join(repr(key) for key in row if key not in texts)):
                    raise UserError(
                        f"{file}: row {number} of questions has {more} beside 'question' and 'answer', which alone are"
                        " kept and given to grade; put the rest into the answer, as JSON for example"
                    )
                yield texts


def own_recipes(config: Config) -> dict[Path, OwnRecipe]:
    """Return the files that the class makes where they are missing: those that it has a method for."""
    task, seed = config.task, config.seed
    made = {
        config.data.train: OwnRecipe(task, "questions", seed, "train"),
        config.data.eval: OwnRecipe(task, "questions", seed, "eval"),
    }
    if config.sft.generator is not None:
        made[config.sft.generator.data] = OwnRecipe(task, "solutions", seed)
    if config.sft.verifier is not None:
        made[config.sft.verifier.data] = OwnRecipe(task, "verifications", seed)
    has = own_task(_file(task), task.settings)
    return {path: recipe for path, recipe in made.items() if hasattr(has, recipe.kind)}


def check_own_task(config: Config) -> None:
    """Raise `UserError` unless the class makes rows that are some, calls reference answers right and labels steps.

    A few rows of each file are asked for, or read from the file where it is there.
    """
    recipes = own_recipes(config)
    first = {path: recipe.rows(_CHECKED_ROWS) for path, recipe in recipes.items() if not path.exists()}
    for path, recipe in recipes.items():
        for row in first.get(path, ()) if recipe.kind != "questions" else ():
            _check_sft_row(config, row)
    for path in (config.data.train, config.data.eval):
        if path.is_file():
            first[path] = read_questions(path, limit=_CHECKED_ROWS, need_answers=False)
    questions = [row for path in (config.data.train, config.data.eval) for row in first.get(path, ())]
    questions = [row for row in questions if row["answer"] is not None]  # the run says where one must not be missing
    try:
        _check_grading(config, questions)
    except NoWorker as error:
        raise UserError(str(error)) from None


def _check_grading(config: Config, questions: Sequence[dict[str, Any]]) -> None:
    """Try the grading in a worker process, as the run does."""
    with GradingPool(num_workers=1) as pool:
        task = OwnTask(config.task, pool)
        for row, verdict in zip(questions, task.grade_all([(row, row["answer"]) for row in questions]), strict=True):
            if not verdict.correct:
                why = verdict.error or f"{_file(config.task)}: grade calls it wrong ({verdict.outcome})"
                raise UserError(f"{why} (asked about the reference answer {row['answer']!r} to {row['question']!r})")
        for row, verdict in zip(questions, task.grade_all([(row, "") for row in questions]), strict=True):
            if verdict.outcome != "graded":
                why = verdict.error or f"{_file(config.task)}: grade did not come to an end ({verdict.outcome})"
                raise UserError(f"{why} (asked about an empty answer to {row['question']!r})")
        steps = [Step("", 0, 0), Step("?", 0, 0)]
        task.label_all([(row, steps[:count]) for row in questions for count in range(3)])
        if task.complaints:
            raise UserError(f"{task.complaints[0]} (asked about steps that a model may write: '' and '?')")


def _check_sft_row(config: Config, row: Mapping[str, str]) -> None:
    """Check that a row to fine-tune on has the form that the prompt asks for."""
    file, solution = _file(config.task), read_solution(row["solution_text"], config.protocol)
    if not solution.well_formed:
        tagged = r"the form <think><step>…</step>…</think><answer>\boxed{…}</answer>"
        form = tagged if config.protocol.solution == "tagged" else r"paragraphs with the answer in a \boxed{…}"
        raise UserError(f"{file}: a solution_text does not keep {form}: {row['solution_text']!r}")
    if "verification_text" in row:
        read = read_verification(row["verification_text"], solution, config.algorithm.verifier_format)
        if read.final == -1 or 0 in read.judgements or len(read.judgements) != len(solution.steps):
            raise UserError(
                f"{file}: a verification_text does not judge each of its {len(solution.steps)} steps and the whole in"
                f" the form of docs/your_own_task.md: {row['verification_text']!r}"
            )


def _file(settings: TaskConfig) -> str:
    if settings.file is None or not settings.file.is_file():
        raise UserError(f"task.name: no file at {settings.file}")
    return str(settings.file.resolve())


def _text(file: str, kind: str, number: int, row: object, column: str) -> str:
    value = row.get(column) if isinstance(row, Mapping) else None
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{file}: row {number} of {kind} is {row!r}; it must be a dictionary with text under "
            f"{', '.join(repr(name) for name in COLUMNS[kind])}"  # type: ignore[index]
        )
    return value
