"""Reading the Parquet files that a run is given, with one clear message for each thing that can be wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import write_parquet

Item = TypeVar("Item")

MADE_WITH = b"tango_hpc.made_with"  # key of a Parquet file's metadata: the settings of what was made here, JSON

QUESTION_COLUMNS = ("id", "question", "answer", "source")
CHAT_COLUMNS = ("messages", "conversations")
ROLES_IN_CHATS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
SFT_COLUMNS = {
    "generator": ("question", "solution_text"),
    "verifier": ("question", "solution_text", "verification_text"),
}


def check_table(path: Path, columns: tuple[str, ...]) -> int:
    """Raise `UserError` unless `path` is a Parquet file with these columns, all text, and at least one row; the row
    count.

    Reads the file's footer only.
    """
    footer = _footer(path)
    names = footer.schema_arrow.names
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(f"{path} lacks the column {', '.join(missing)}; it has {', '.join(names)}")
    types = {name: footer.schema_arrow.field(name).type for name in columns}
    others = [f"{name} ({found})" for name, found in types.items() if not _is_text(found)]
    if others:
        raise UserError(
            f"{path}: the column {', '.join(others)} is not text; write its values as strings (with pandas: "
            "frame[name].astype(str))"
        )
    if footer.metadata.num_rows == 0:
        raise UserError(f"{path} has no rows; give a data set with at least one")
    return footer.metadata.num_rows


def check_ids(path: Path) -> None:
    """Raise `UserError` where rows share an id, by which the answers to a question are put together."""
    ids = Counter(row["id"] for row in read_rows(path, ("id",)))
    repeated = [name for name, count in ids.items() if count > 1]
    if repeated:
        raise UserError(
            f"{path}: the id {repeated[0]!r} stands in {ids[repeated[0]]} rows, and so do {len(repeated) - 1} more in"
            " several; give every row its own (`tango data` does)"
        )


def _is_text(found: pa.DataType) -> bool:
    """Return whether a column's values are strings, or all missing, which is said where they are read."""
    if pa.types.is_dictionary(found):
        return _is_text(found.value_type)
    types = pa.types
    return any(is_so(found) for is_so in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


def _footer(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise UserError(f"no data set at {path}; `tango data --help` shows how to make one") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as Parquet: {error}") from None


def read_rows(
    path: Path, columns: tuple[str, ...], limit: int | None = None, optional: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return the first `limit` rows (default: all) as dictionaries of these columns and the `optional` ones.

    Cells that are empty, or hold bytes that are no UTF-8, are refused with their row; optional ones may be empty.
    """
    check_table(path, columns)
    try:
        table = pq.read_table(path, columns=[*columns, *optional])
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # its footer is sound, its pages are not
        raise UserError(f"cannot read {path} as Parquet: {error}") from None
    if limit is not None:
        table = table.slice(0, limit)
    for name in columns:
        if table[name].null_count:
            row = table[name].is_null().index(pa.scalar(True)).as_py()
            raise UserError(
                f"{path}: column {name} is empty in row {row} and {table[name].null_count - 1} more; fill it, or leave"
                " these rows out" + (" (or set train.majority_share: docs/data.md)" if name == "answer" else "")
            )
    try:
        return table.to_pylist()
    except UnicodeDecodeError:
        column, row, problem = next(_not_text(table))
        raise UserError(f"{path}: column {column} is not text in UTF-8 in row {row}: {problem}") from None


def read_questions(path: Path, limit: int | None = None, *, need_answers: bool = True) -> list[dict[str, Any]]:
    """Return the first `limit` questions (default: all), with their metadata where the file has any (text: JSON, of
    `tango data`). Without `need_answers` answers may be missing: None.
    """
    schema = _footer(path).schema_arrow
    has_metadata = "metadata" in schema.names and _is_text(schema.field("metadata").type)
    optional = [*(["metadata"] if has_metadata else []), *([] if need_answers else ["answer"])]
    check_table(path, QUESTION_COLUMNS)
    return read_rows(path, tuple(name for name in QUESTION_COLUMNS if name not in optional), limit, tuple(optional))


def check_sft_table(path: Path, role: str) -> None:
    """Raise `UserError` unless `path` holds rows to fine-tune `role` on: `SFT_COLUMNS`, or chats for the generator."""
    if role != "generator" or _chat_column(path) is None:
        check_table(path, SFT_COLUMNS[role])
    elif _footer(path).metadata.num_rows == 0:
        raise UserError(f"{path} has no rows; give a data set with at least one")


def read_sft_rows(path: Path, role: str) -> list[dict[str, Any]]:
    """Return the rows to fine-tune `role` on, with the columns `SFT_COLUMNS`.

    A chat is a user's message and an assistant's, in the column messages (role, content) or conversations (from,
    value): the question and its solution. The role's own prompt takes the place of a system message in it. Raises
    UserError, naming the row, for other chats.
    """
    column = _chat_column(path) if role == "generator" else None
    if column is None:
        return read_rows(path, SFT_COLUMNS[role])
    rows = []
    for number, chat in enumerate(pq.read_table(path, columns=[column])[column].to_pylist()):
        turns = [(str(turn.get("role") or turn.get("from")), turn.get("content") or turn.get("value")) for turn in chat]
        kept = [(ROLES_IN_CHATS.get(name, name), text) for name, text in turns if name != "system"]
        if [name for name, _ in kept] != ["user", "assistant"] or not all(isinstance(text, str) for _, text in kept):
            raise UserError(
                f"{path}: {column} of row {number} is {', '.join(name for name, _ in turns) or 'empty'}: a row to"
                " fine-tune on needs one user message and one assistant message, both text (a system message is passed"
                " over: the role's prompt takes its place)"
            )
        rows.append({"question": kept[0][1], "solution_text": kept[1][1]})
    return rows


def _chat_column(path: Path) -> str | None:
    """Return the column of a file that has chats and lacks the columns of solutions."""
    schema = _footer(path).schema_arrow
    if set(SFT_COLUMNS["generator"]) <= set(schema.names):
        return None
    return next((name for name in CHAT_COLUMNS if name in schema.names and _holds_chats(schema.field(name).type)), None)


def _holds_chats(found: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(found) or types.is_large_list(found) or types.is_list_view(found)
    return is_list and types.is_struct(found.value_type)


def _not_text(table: pa.Table) -> Iterator[tuple[str, int, UnicodeDecodeError]]:
    """Yield the cells whose bytes are no text: column, row, what is wrong."""
    for name in table.column_names:
        for row, cell in enumerate(table[name]):
            try:
                cell.as_py()
            except UnicodeDecodeError as error:
                yield name, row, error


def evenly_spaced(rows: Sequence[Item], count: int | None) -> list[Item]:
    """Return `count` of the rows (default and at most: all), in order and equally far apart: files are often sorted."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def write_rows(
    path: Path,
    rows: list[dict[str, Any]],
    *,
    made_with: Mapping[str, Any] | None = None,
    schema: pa.Schema | None = None,
) -> None:
    """Write rows as Parquet, whole or not at all; the file carries the settings that it was `made_with`.

    `schema`: the types of the columns; by default those of the rows' values.
    """
    table = pa.Table.from_pylist(rows, schema)
    if made_with is not None:
        table = table.replace_schema_metadata({MADE_WITH: json.dumps(made_with)})
    write_parquet(path, table)


def read_made_with(path: Path) -> dict[str, Any] | None:
    """Return the settings that a file was made with; None for a file that is not there, or that others have made."""
    if not path.is_file():
        return None
    metadata = _footer(path).schema_arrow.metadata or {}
    return json.loads(metadata[MADE_WITH]) if MADE_WITH in metadata else None


def check_made_with(path: Path, wanted: Mapping[str, Any], keys: str) -> None:
    """Raise `UserError` for a file that was made here with other settings than `wanted`; `keys` names the config's."""
    found = read_made_with(path)
    if found is None:
        return
    wanted = json.loads(json.dumps(wanted))
    names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if names:
        difference = ", ".join(f"{name} {found.get(name)} (the config: {wanted.get(name)})" for name in names)
        raise UserError(
            f"{path} was made with other settings: {difference}. Give {keys} the values that it was made with, remove "
            "the file so that it is made anew, or name another one"
        )
