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
    return any(is_so(found) for is_so in (pa.types.is_string, pa.types.is_large_string, pa.types.is_null))


def _footer(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise UserError(f"no data set at {path}; `tango data --help` shows how to make one") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as Parquet: {error}") from None


def read_rows(path: Path, columns: tuple[str, ...], limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first `limit` rows (default: all) as dictionaries of these columns.

    Cells that are empty, or hold bytes that are no UTF-8, are refused with their row.
    """
    check_table(path, columns)
    try:
        table = pq.read_table(path, columns=list(columns))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # its footer is sound, its pages are not
        raise UserError(f"cannot read {path} as Parquet: {error}") from None
    if limit is not None:
        table = table.slice(0, limit)
    for name in columns:
        if table[name].null_count:
            row = table[name].is_null().index(pa.scalar(True)).as_py()
            raise UserError(f"{path}: column {name} is empty in row {row} and {table[name].null_count - 1} more")
    try:
        return table.to_pylist()
    except UnicodeDecodeError:
        column, row, problem = next(_not_text(table))
        raise UserError(f"{path}: column {column} is not text in UTF-8 in row {row}: {problem}") from None


def read_questions(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first `limit` questions (default: all), with their metadata where the file has any (text: JSON, of
    `tango data`).
    """
    schema = _footer(path).schema_arrow
    has_metadata = "metadata" in schema.names and _is_text(schema.field("metadata").type)
    return read_rows(path, (*QUESTION_COLUMNS, "metadata") if has_metadata else QUESTION_COLUMNS, limit)


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
