"""Checksums of the files that a run reads, by which a later attempt tells that they are the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of larger files only blocks are read, evenly spaced from the first to the last.
WHOLE_BYTES = 64 * 2**20
BLOCK_BYTES = 2**20


def fingerprint(path: Path, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return path, size and checksum of a file or of all files in a folder; `known` files of that size and time are not
    read.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        if not file.is_file() or file.name.startswith("."):
            continue
        status = file.stat()
        before = known.get(str(file))
        if before is not None and (before["size"], before["mtime_ns"]) == (status.st_size, status.st_mtime_ns):
            found[str(file)] = dict(before)
        else:
            crc32 = checksum(file, status.st_size)
            found[str(file)] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "crc32": crc32}
    return {"path": str(path), "files": found}


def checksum(file: Path, size: int) -> int:
    """Return the CRC-32 of a file, of large ones of blocks."""
    count = max(1, min(-(-size // BLOCK_BYTES), WHOLE_BYTES // BLOCK_BYTES))
    last = max(size - BLOCK_BYTES, 0)
    starts = range(0, size, BLOCK_BYTES) if size <= WHOLE_BYTES else [last * i // (count - 1) for i in range(count)]
    crc = 0
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            crc = zlib.crc32(stream.read(BLOCK_BYTES), crc)
    return crc
