"""Reading the Parquet files that a run is given, with one clear message for each thing that can be wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.errors import UserError
from tango_hpc.files import write_parquet

Row = TypeVar("Row")

QUESTION_COLUMNS = ("id", "question", "answer", "source")
SFT_COLUMNS = {
    "generator": ("question", "solution_text"),
    "verifier": ("question", "solution_text", "verification_text"),
}


def check_table(path: Path, columns: tuple[str, ...]) -> int:
    """Raise `UserError` unless `path` is a Parquet file with these columns and at least one row; the row count.

    Reads the file's footer only.
    """
    try:
        footer = pq.ParquetFile(path)
    except FileNotFoundError:
        raise UserError(f"no data set at {path}; `tango data --help` shows how to make one") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"cannot read {path} as Parquet: {error}") from None
    names = footer.schema_arrow.names
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(f"{path} lacks the column {', '.join(missing)}; it has {', '.join(names)}")
    if footer.metadata.num_rows == 0:
        raise UserError(f"{path} has no rows; give a data set with at least one")
    return footer.metadata.num_rows


def read_rows(path: Path, columns: tuple[str, ...], limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` rows (default: all) as dictionaries of these columns. Empty cells are refused with their row."""
    check_table(path, columns)
    table = pq.read_table(path, columns=list(columns))
    if limit is not None:
        table = table.slice(0, limit)
    for name in columns:
        if table[name].null_count:
            row = table[name].is_null().index(pa.scalar(True)).as_py()
            raise UserError(f"{path}: column {name} is empty in row {row} and {table[name].null_count - 1} more")
    return table.to_pylist()


def evenly_spaced(rows: Sequence[Row], count: int | None) -> list[Row]:
    """`count` of the rows (default and at most: all), in their order and equally far apart: files are often sorted."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as Parquet, whole or not at all."""
    write_parquet(path, pa.Table.from_pylist(rows))
