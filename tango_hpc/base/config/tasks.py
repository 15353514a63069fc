"""Settings of tasks: the shipped tasks and the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tango_hpc.base.config.paths import absolute
from tango_hpc.base.config.values import FilePath, Positive, Section, Share, of_json


class LastLetterConfig(Section):
    """Last-letter concatenation (paper, Section 4.3): question sets and sloppy fine-tuning teachers."""

    sft_words: tuple[Positive, Positive] = (2, 6)
    sft_letters: tuple[Positive, Positive] = (3, 6)
    train_words: tuple[Positive, Positive] = (2, 10)
    train_letters: tuple[Positive, Positive] = (3, 10)
    eval_words: tuple[Positive, Positive] = (2, 12)
    eval_letters: tuple[Positive, Positive] = (3, 12)
    generator_slip: Share = Field(
        0.5, description="Chance that a fine-tuning step takes the first letter, not the last."
    )
    verifier_slip: Share = Field(0.2, description="Chance that a fine-tuning judgement of a step is flipped.")
    verifier_drill: Share = Field(
        0.0, description="Share of the verifier's rows, the first ones, with one-letter words."
    )
    verifier_careful: Share = Field(0.0, description="Share of the verifier's rows, the first ones, without flips.")
    verifier_typos: Share = Field(
        0.0,
        description=(
            "Chance that a step of the solutions in the verifier's fine-tuning data misspells its word, which is no "
            "mistake, and, in wrong solutions, that it appends another letter than it names, which is one."
        ),
    )
    verifier_verdicts: Literal["judgements", "solution"] = Field(
        "judgements",
        description=(
            "What a fine-tuning verdict says: judgements = whether all judgements above it are CORRECT; solution = "
            "the truth about the solution, flipped by itself with the chance verifier_slip."
        ),
    )
    dictionary: FilePath | None = Field(
        None, description="Text file with a word on each line to choose from. Null: words are random letters."
    )
    worded: bool = Field(False, description="Questions say what to do, as a pretrained model needs.")
    train_questions: Positive = 20000
    eval_questions: Positive = 512
    sft_rows: Positive = 20000


SHIPPED_TASKS = ("addition", "last_letter", "math")
_IN_A_FILE = {
    "addition": Path(__file__).parents[2] / "questions/tasks" / "addition.py"
}  # shipped as a user's own would be


def _task_name(name: str) -> str:
    if name not in SHIPPED_TASKS and not name.endswith(".py"):
        raise ValueError(f"must be {', '.join(SHIPPED_TASKS)} or the path of a Python file that ends in .py")
    return name if name in SHIPPED_TASKS else str(absolute(Path(name)))


class TaskConfig(Section):
    """The questions, and how answers are graded."""

    name: Annotated[str, AfterValidator(_task_name)] = Field(
        description=(
            "addition, last_letter, math, or the path of a Python file with a task of your own (docs/your_own_task.md)."
        )
    )
    settings: Annotated[dict[str, Any], AfterValidator(of_json)] = Field(
        {}, description="Of your own task and of addition: the arguments that its class is made with."
    )
    last_letter: LastLetterConfig | None = Field(
        None, description="Synthesise the files that `data` and `sft` name, where missing."
    )

    @property
    def is_own(self) -> bool:
        """Return whether the task stands in a file of the user's."""
        return self.name.endswith(".py")

    @property
    def file(self) -> Path | None:
        """The file whose one class is the task: the user's own, or one that is shipped like it; else None."""
        return Path(self.name) if self.is_own else _IN_A_FILE.get(self.name)
