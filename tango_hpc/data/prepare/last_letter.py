"""`tango data last_letter`: the synthetic set of the paper's Section 4.3, made by seed instead of read."""

from __future__ import annotations

from pathlib import Path

from tango_hpc.data.tables import write_rows
from tango_hpc.errors import UserError
from tango_hpc.tasks import last_letter


def make_last_letter(out: Path, *, kind: str, rows: int, words: str, letters: str, slip: float, seed: int) -> int:
    """Write `rows` rows of `kind` to `out`; `words` and `letters` are ranges such as "2-6". Returns the row count."""
    between, long = _range("--words", words), _range("--letters", letters)
    if kind == "questions":
        made = last_letter.rl_rows(seed, rows, words=between, letters=long)
    elif kind == "generator_sft":
        made = last_letter.generator_sft_rows(seed, rows, words=between, letters=long, slip=slip)
    elif kind == "verifier_sft":
        made = last_letter.verifier_sft_rows(seed, rows, words=between, letters=long, slip=slip)
    else:
        raise UserError(f"--kind {kind!r}: choose questions, generator_sft or verifier_sft")
    write_rows(out, made)
    return len(made)


def _range(option: str, text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"{option} {text!r} is not a range such as 2-6")
    return int(first), int(last)
