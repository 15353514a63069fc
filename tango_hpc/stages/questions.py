"""The questions that a run can ask: those whose prompt fits the generator's context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.errors import CheckFailed
from tango_hpc.models.parallel.exchange import Exchange
from tango_hpc.questions.data.sampler import QuestionSampler
from tango_hpc.questions.data.tables import read_questions
from tango_hpc.questions.tasks import Task
from tango_hpc.stages.held_out import HeldOut
from tango_hpc.stages.role import Generator
from tango_hpc.stages.sharing import in_shares


class TrainingQuestions:
    """The questions of a run that fit the generator's context, drawn in an order that depends on the seed alone."""

    def __init__(self, config: Config, task: Task, generator: Generator, exchange: Exchange) -> None:
        need_answers = config.train.majority_share is None
        self._rows, self.num_too_long = questions_that_fit(config.data.train, task, generator, exchange, need_answers)
        answered = [row for row in self._rows if row["answer"] is not None]
        self.notes = task.notes(answered)
        if len(answered) < len(self._rows):
            without = f"{len(self._rows) - len(answered):,} of {len(self._rows):,}"
            self.notes.append(f"{without} training questions have no answer: they take that of a majority")
        self._sampler = QuestionSampler(len(self._rows), config.seed)

    @property
    def num_rows(self) -> int:
        """The number of questions in the file."""
        return len(self._rows) + self.num_too_long

    def draw(self, count: int) -> list[int]:
        """Return the places of the next `count` questions."""
        return self._sampler.draw(count)

    def at(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return the questions at these places."""
        return [self._rows[place] for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; JSON."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._sampler.load_state_dict(state)


def questions_that_fit(
    path: Path, task: Task, generator: Generator, exchange: Exchange, need_answers: bool = True
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of `path` whose prompt fits the generator's context, and how many do not. Collective.

    Raises `CheckFailed` where none does.
    """
    rows = read_questions(path, need_answers=need_answers)
    fits = in_shares(
        exchange, lambda some: [generator.fits(generator.prompt(task.statement(row))) for row in some], rows
    )
    kept = [row for row, fitting in zip(rows, fits, strict=True) if fitting]
    if not kept:
        raise CheckFailed(
            f"none of the {len(rows)} questions in {path} fits generator.max_prompt_tokens, "
            f"{generator.settings.max_prompt_tokens}"
        )
    return kept, len(rows) - len(kept)


def not_asked(num_too_long: int, num_rows: int, held_out: HeldOut, limit: int) -> Iterator[str]:
    """Yield a line for each data set, of training and evaluation, of which questions are left out."""
    for what, count, total in (
        ("training", num_too_long, num_rows),
        ("evaluation", held_out.num_too_long, held_out.num_questions),
    ):
        if count:
            yield (
                f"{count:,} of {total:,} {what} questions are not asked: their prompt is longer than "
                f"generator.max_prompt_tokens = {limit}"
            )
