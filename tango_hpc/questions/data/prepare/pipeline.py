"""`tango data`: read a public set, drop what must not be in it, write Parquet, say what was dropped and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import parquet_writer
from tango_hpc.questions.data.prepare.overlap import HeldOut
from tango_hpc.questions.data.prepare.readers import DATA_SETS, DataSet
from tango_hpc.questions.data.prepare.rows import SCHEMA, PreparedRow, fingerprint, loosely_normalized, normalized
from tango_hpc.questions.data.prepare.sources import find_files, read_records
from tango_hpc.questions.data.tables import MADE_WITH, read_made_with, read_rows

TRAINING_QUESTION_CHARACTERS = 6000
_ROWS_PER_GROUP = 4096


@dataclass
class Report:
    """The fate of every record; `kept` plus all counts of drops and `not_part` is `read`.

    `several_answers` counts those of the kept ones whose reference boxes different answers in its last sentence.
    """

    name: str
    split: str
    files: list[str]
    authors_rows: int | None = None
    read: int = 0
    kept: int = 0
    not_part: int = 0
    missing_question: int = 0
    missing_answer: int = 0
    several_answers: int = 0
    over_long: int = 0
    duplicates: int = 0
    conflicting_duplicates: int = 0
    in_evaluation_sets: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, row_id: str) -> None:
        """Keep the first ids of each kind of drop, for the user to look at."""
        if len(self.examples.setdefault(kind, [])) < 5:
            self.examples[kind].append(row_id)

    def lines(self) -> list[str]:
        """Return the report as the command prints it."""
        counts = [(kind, label, getattr(self, kind)) for kind, label in _LABELS.items()]
        for name, count in sorted(self.in_evaluation_sets.items()):
            counts.append((f"also in {name}", f"also in {name}", count))
        lines = [f"{self.name} ({self.split}): {self.kept:,} of {self.read:,} records kept"]
        for kind, label, count in counts:
            if count:
                ids = self.examples.get(kind, [])
                listed = f": {', '.join(ids)}{', ...' * (count > len(ids))}" if ids else ""
                lines.append(f"  {count:>8,} {label}{listed}")
        if self.authors_rows not in (None, self.kept):
            lines.append(
                f"  the paper's authors evaluate on {self.authors_rows:,}: figures are not of the same questions"
            )
        return lines


_LABELS = {
    "not_part": "not part of the set",
    "missing_question": "without a question",
    "missing_answer": "without an answer",
    "over_long": "over-long questions",
    "duplicates": "duplicates",
    "conflicting_duplicates": "duplicates with another answer",
    "several_answers": "of those kept: several answers are boxed in the last sentence, and all of them are the answer",
}


def prepare(
    name: str,
    *,
    source: str | None,
    out: Path,
    split: str | None = None,
    exclude: Iterable[Path] = (),
    keep_overlap: bool = False,
    max_question_characters: int | None = None,
    limit: int | None = None,
) -> Report:
    """Prepare data set `name` from `source` (path or hub id; default: its hub data set) into the Parquet file `out`.

    exclude: prepared evaluation files, or folders of them; their questions are left out, reworded ones too (`overlap`).
    A training split needs it, unless `keep_overlap` says that the overlap is wanted.
    max_question_characters: longer questions are dropped; by default those of training splits above
    `TRAINING_QUESTION_CHARACTERS`, and none that are evaluated on.
    Rows are streamed: half a million take the memory of their 64-bit fingerprints. A JSON report goes beside `out`,
    which carries these settings itself, the excluded sets by what they hold.
    Raises `UserError` for whatever is wrong with the request or the files.
    """
    if name not in DATA_SETS:
        raise UserError(f"no data set {name!r}; there are {', '.join([*DATA_SETS, 'last_letter'])}")
    data_set = DATA_SETS[name]
    split = split or data_set.default_split
    exclude = list(exclude)
    if data_set.is_training(split) and not exclude and not keep_overlap:
        raise UserError(
            f"{name} ({split}) is trained on: give --exclude with the evaluation sets that you prepared (a folder or "
            "files), so that their questions are left out, or --keep-overlap"
        )
    if max_question_characters is None and data_set.is_training(split):
        max_question_characters = TRAINING_QUESTION_CHARACTERS
    held_out, excluded = _held_out(exclude)
    made_with = {
        "data_set": name,
        "split": split,
        "source": source or data_set.hub,
        "exclude": excluded,
        "keep_overlap": keep_overlap,
        "max_question_characters": max_question_characters,
        "limit": limit,
    }
    files = find_files(source or data_set.hub, data_set.patterns(split))
    report = Report(
        name,
        split,
        [str(file) for file in files],
        authors_rows=data_set.authors_rows if split == data_set.default_split and limit is None else None,
        in_evaluation_sets=dict.fromkeys(sorted(held_out.names), 0),
    )
    rows = _checked_rows(name, data_set, files, report, held_out, max_question_characters)
    _write(out, rows, report, limit, made_with)
    out.with_suffix(".report.json").write_text(json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")
    return report


def _checked_rows(name: str, data_set: DataSet, files: list[Path], report: Report, held_out: HeldOut,
                  max_question_characters: int | None) -> Iterator[PreparedRow]:  # fmt: skip
    seen: dict[int, int] = {}  # question -> answer, as fingerprints
    ids: set[int] = set()  # fingerprints
    index, current = -1, None
    for file, record in read_records(files):
        report.read += 1
        index = 0 if file != current else index + 1
        current = file
        row = _read(name, data_set, record, file, index)
        if row is None:
            report.not_part += 1
            continue
        row.question, row.source = row.question.strip(), name
        row.id = row.id if row.id.startswith(name) else f"{name}-{row.id}"
        if fingerprint(row.id) in ids:  # rows without an id of their own are counted from 0 in each file
            row.id = f"{name}-{file.parent.name}-{file.stem}-{index}"
        ids.add(fingerprint(row.id))
        _check_text(row, file, index)
        kind = _fault(row, seen, report, held_out, max_question_characters, data_set.questions_repeat)
        if kind is None:
            report.kept += 1
            if "boxes" in row.metadata:
                report.several_answers += 1
                report.note("several_answers", row.id)
            yield row
        else:
            report.note(kind, row.id)


def _read(name: str, data_set: DataSet, record: Mapping[str, Any], file: Path, index: int) -> PreparedRow | None:
    """Return the record as a row. Raises `UserError`, naming the row, where a field is missing or of another kind."""
    try:
        row = data_set.reader(record, file, index)
        if row is not None and not all(isinstance(text, str) for text in (row.id, row.question, row.answer)):
            raise TypeError("question and answer must be text")
    except UserError as error:
        raise UserError(f"{file}, row {index + 1}: {error}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}, row {index + 1}: no record of {name}, a field is of another kind ({error})") from None
    return row


def _check_text(row: PreparedRow, file: Path, index: int) -> None:
    """Raise `UserError` for a row with half a character, which no file can hold: JSON can spell it, as \\ud800."""
    for column, text in row.as_columns().items():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{file}, row {index + 1} ({row.id!a}): its {column} holds half a character (U+"
                f"{ord(text[error.start]):04X}, a lone surrogate): mend that row, or leave it out"
            ) from None


def _fault(
    row: PreparedRow,
    seen: dict[int, int],
    report: Report,
    held_out: HeldOut,
    max_question_characters: int | None,
    questions_repeat: bool,
) -> str | None:
    """Return why a row is dropped, counted in the report; None for a good one."""
    kind = None
    if not row.question:
        kind = "missing_question"
    elif not row.answer:
        kind = "missing_answer"
    elif max_question_characters is not None and len(row.question) > max_question_characters:
        kind = "over_long"
    if kind is not None:
        setattr(report, kind, getattr(report, kind) + 1)
        return kind
    if held_out and (found := held_out.find(row.question)) is not None:
        report.in_evaluation_sets[found] += 1
        return f"also in {found}"
    if questions_repeat:
        return None
    key, answer = fingerprint(normalized(row.question) or row.question), fingerprint(row.answer.strip())
    if key in seen:
        kind = "duplicates" if seen[key] == answer else "conflicting_duplicates"
        setattr(report, kind, getattr(report, kind) + 1)
        return kind
    seen[key] = answer
    return None


def check_held_out(train: Path, held_out: Path) -> None:
    """Raise `UserError` where the prepared set `train` has questions of `held_out`, which then is not held out.

    What `held_out` was named by --exclude needs no second look, and one who said --keep-overlap wants it so. Files that
    others have made are theirs to judge.
    """
    made_with = read_made_with(train) or {}
    if "data_set" not in made_with or made_with["keep_overlap"]:
        return
    questions = _fingerprints(_questions(held_out))
    if _identity(questions) in made_with["exclude"]:
        return
    shared = len(questions & _fingerprints(_questions(train)))
    if shared:
        raise UserError(
            f"{shared} of the {len(questions)} questions of {held_out} stand in {train}, which was prepared without "
            f"that set among its --exclude ({', '.join(made_with['exclude'].values()) or 'none'}). Prepare it again: "
            f"tango data {made_with['data_set']} --exclude {held_out} ...; or, if that is meant, with --keep-overlap"
        )


def _held_out(exclude: Iterable[Path]) -> tuple[HeldOut, dict[str, str]]:
    """Return all questions in the given files and folders; and identity -> name of each file."""
    questions: list[tuple[str, str]] = []
    files: dict[str, str] = {}
    for path in exclude:
        paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not paths:
            raise UserError(f"--exclude {path}: no Parquet files there; prepare the evaluation sets first")
        for file in paths:
            read = list(_questions(file))
            files[_identity(_fingerprints(read))] = file.name
            questions += read
    return HeldOut(questions), files


def _questions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each question of a prepared file with the data set that it is from."""
    for row in read_rows(file, ("question", "source")):
        yield row["question"], row["source"]


def _fingerprints(questions: Iterable[tuple[str, str]]) -> set[int]:
    return {fingerprint(loosely_normalized(question)) for question, _ in questions}


def _identity(questions: Iterable[int]) -> str:
    """Return an identity that files with the same questions share."""
    return f"{fingerprint(','.join(map(str, sorted(questions)))):016x}"


def _write(
    out: Path, rows: Iterator[PreparedRow], report: Report, limit: int | None, made_with: dict[str, Any]
) -> None:
    """Write row groups as they fill. Raises `UserError`, with what was there left as it is, where there are no rows."""
    with parquet_writer(out, SCHEMA.with_metadata({MADE_WITH: json.dumps(made_with)})) as writer:
        group: list[dict[str, str]] = []
        for row in rows:
            group.append(row.as_columns())
            if len(group) == _ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(group, SCHEMA))
                group = []
            if limit is not None and report.kept >= limit:
                break
        if group:
            writer.write_table(pa.Table.from_pylist(group, SCHEMA))
        if not report.kept:
            raise UserError("\n".join([*report.lines(), "no rows are left to write"]))
