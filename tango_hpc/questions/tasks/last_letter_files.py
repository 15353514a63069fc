"""Files of last-letter questions: those that a configuration names and that are made where missing, and
`tango data last_letter`. Each file carries the settings that it was made with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.questions.data.tables import write_rows
from tango_hpc.questions.tasks import last_letter
from tango_hpc.questions.tasks.last_letter import SPLITS, Range, Split, Verdicts

Kind = Literal["questions", "generator_sft", "verifier_sft"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Recipe:
    """All that the content of a file depends on; what another kind of row needs is None."""

    kind: Kind
    seed: int
    rows: int
    words: Range
    letters: Range
    split: Split | None = None
    slip: float | None = None
    careful: float | None = None
    drill: float | None = None
    typos: float | None = None
    verdicts: Verdicts | None = None
    worded: bool | None = None
    dictionary: str | None = None

    def made_with(self) -> dict[str, Any]:
        """Return the recipe as the file carries it; JSON."""
        return {"task": "last_letter"} | {name: value for name, value in asdict(self).items() if value is not None}

    def write(self, path: Path) -> None:
        """Make the rows and write them, whole or not at all."""
        words = last_letter.read_dictionary(Path(self.dictionary)) if self.dictionary is not None else None
        lengths: dict[str, Any] = {"words": self.words, "letters": self.letters}
        lengths |= {"worded": self.worded or False, "dictionary": words}
        if self.kind == "questions":
            rows = last_letter.rl_rows(self.seed, self.rows, **lengths, split=self.split or "train")
        elif self.kind == "generator_sft":
            rows = last_letter.generator_sft_rows(self.seed, self.rows, **lengths, slip=self.slip or 0.0)
        else:
            rows = last_letter.verifier_sft_rows(
                self.seed,
                self.rows,
                **lengths,
                slip=self.slip or 0.0,
                careful=self.careful or 0.0,
                drill=self.drill or 0.0,
                typos=self.typos or 0.0,
                verdicts=self.verdicts or "judgements",
            )
        write_rows(path, rows, made_with=self.made_with())


def last_letter_recipes(config: Config) -> dict[Path, Recipe]:
    """Return the files that `task.last_letter` makes where they are missing; none without that section."""
    settings, seed = config.task.last_letter, config.seed
    if settings is None:
        return {}
    train, held_out = (settings.train_words, settings.train_letters), (settings.eval_words, settings.eval_letters)
    sft = (settings.sft_words, settings.sft_letters)
    made = {
        config.data.train: Recipe("questions", seed * 4, settings.train_questions, *train, split="train"),
        config.data.eval: Recipe("questions", seed * 4 + 1, settings.eval_questions, *held_out, split="eval"),
    }
    if config.sft.generator is not None:
        made[config.sft.generator.data] = Recipe(
            "generator_sft", seed * 4 + 2, settings.sft_rows, *sft, slip=settings.generator_slip
        )
    if config.sft.verifier is not None:
        made[config.sft.verifier.data] = Recipe(
            "verifier_sft",
            seed * 4 + 3,
            settings.sft_rows,
            *sft,
            slip=settings.verifier_slip,
            careful=settings.verifier_careful,
            drill=settings.verifier_drill,
            typos=settings.verifier_typos or None,
            verdicts=None if settings.verifier_verdicts == "judgements" else settings.verifier_verdicts,
        )
    dictionary = None if settings.dictionary is None else str(settings.dictionary)
    return {
        path: replace(recipe, worded=settings.worded or None, dictionary=dictionary)  # None is not in a file's recipe
        for path, recipe in made.items()
    }


def make_last_letter(
    out: Path, *, kind: str, split: str | None, rows: int, words: str, letters: str, slip: float, seed: int
) -> int:
    """Write `rows` rows of `kind` to `out`; `words` and `letters` are ranges such as "2-6". Returns the row count.

    `split` says which questions may be asked ("train" unless given); fine-tuning rows have a split of their own.
    """
    if kind not in KINDS:
        raise UserError(f"--kind {kind!r}: choose {', '.join(KINDS)}")
    if split is not None and (kind != "questions" or split not in SPLITS):
        raise UserError(f"--split {split!r}: for --kind questions, one of {', '.join(SPLITS)}")
    lengths = _range("--words", words), _range("--letters", letters)
    if kind == "questions":
        recipe = Recipe("questions", seed, rows, *lengths, split=split or "train")
    elif kind == "generator_sft":
        recipe = Recipe(kind, seed, rows, *lengths, slip=slip)
    else:
        recipe = Recipe(kind, seed, rows, *lengths, slip=slip, careful=0.0, drill=0.0)
    recipe.write(out)
    return rows


def _range(option: str, text: str) -> Range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"{option} {text!r} is not a range such as 2-6")
    return int(first), int(last)
