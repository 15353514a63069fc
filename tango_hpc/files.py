"""Files that a crash, a full disk or a reader never meets half written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which becomes `path` when all is well; after an error `path` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace `path` by `content`: others see the old file or the new one. On an error the old one stays.

    `durable` waits for the disk, so that the new file also survives the machine going down.
    """
    with _replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def open_to_readers(path: Path) -> None:
    """Give a file that a library has made for its owner alone the mode of any other new file there: the umask decides."""
    probe = path.with_name(f".{path.name}.mode")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        path.chmod(os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


@contextmanager
def parquet_writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer of tables of `schema` to the file `path`, which is there when the block ends; after an error the old one is."""
    import pyarrow.parquet as pq  # takes a while, and most who write files write no Parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        yield writer


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write `table` as Parquet, whole or not at all; the folder is made."""
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table)
