"""Files that a crash, a full disk or a reader never meets half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replaces `path` by `content`: others see the old file or the new one. On an error the old one stays.

    `durable` waits for the disk, so that the new file also survives the machine going down.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
