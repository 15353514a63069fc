"""Files that a crash, a full disk or a reader never meets half written; and how to read those that were damaged anyhow.

What only shows or counts things is read tolerantly: damage costs the damaged part and a warning that names the file.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which becomes `path` at the end of the block; after an error `path` is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path, instead_of=temporary):
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):  # what is there already says enough
            temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, *, instead_of: Path | None = None) -> Iterator[None]:
    """Errors of the system name `path` where they name nothing, as those of writing do not, or what it is
    written as.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(instead_of)):
            error.filename = str(path)
        raise


# So often a file is opened again that another node has replaced meanwhile.
STALE_TRIES = 5

# Errors of a disk that takes nothing more until a person frees space or mounts it anew.
_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "see why it cannot be written (`mount`, `dmesg`)",
}


def is_of_disk(error: BaseException | None) -> bool:
    """Return whether an error says that the disk takes nothing more: no room, also of the user's quota, or
    read-only.
    """
    return isinstance(error, OSError) and error.errno in _REMEDIES


def explain_disk(error: OSError) -> str:
    """Return what to do about an error for which `is_of_disk` is true."""
    path = Path(error.filename) if error.filename else None
    where = next((folder for folder in (path.parents if path else ()) if folder.is_dir()), None)
    free = ""
    if where is not None and error.errno != errno.EROFS:
        free = f" ({shutil.disk_usage(where).free / 2**20:,.0f} MB free there)"
    remedy = _REMEDIES[error.errno or errno.ENOSPC]
    return f"{error.strerror}: {path or 'a file of the run'}{free}; {remedy} and continue with --resume"


def remedy_in(text: str) -> str:
    """Return what to do about an error, of the disk or another, whose text is given."""
    return next((remedy for code, remedy in _REMEDIES.items() if os.strerror(code) in text), "put that right")


# Of a shared file system whose server is away for a while, or has thrown this client out.
_AWAY = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.EREMOTEIO, errno.ENODEV, errno.ENXIO,
)  # fmt: skip


def is_away(error: BaseException | None) -> bool:
    """Return whether an error says that a file system does not answer, which often passes within minutes."""
    return isinstance(error, OSError) and error.errno in _AWAY


class Patience:
    """Bears with a file system that `is_away`: `with patience:` around each turn of a loop that looks for news.

    A turn that ends in such an error is left as it is, with a warning, until none has come to its end for `seconds`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: object) -> bool:
        if not is_away(error):
            self._since = None
            return False
        if self._since is None:
            self._since = time.monotonic()
        if time.monotonic() - self._since > self._seconds:
            return False
        warn_once(f"a file system does not answer ({error}): what is read and written there has to wait")
        return True


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace `path` by `content`: others see the old file or the new one. On an error the old one stays.

    `durable` waits for the disk, so that the new file also survives the machine going down.
    """
    with _replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_for_owner(path: Path, text: str) -> None:
    """Write a new file that its owner alone can read, from its first byte on."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8", errors="replace")


def open_to_readers(path: Path) -> None:
    """Give a file that a library has made for its owner alone the mode of any other new file there: the umask
    decides.
    """
    probe = path.with_name(f".{path.name}.mode")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        path.chmod(os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def append_line(path: Path, line: str) -> None:
    """Add a line to `path` and wait for the disk. A half line that a crash left at its end stays a line of its own."""
    with naming(path), path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode("utf-8") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_replaced(path: Path) -> bytes:
    """Return the contents of a file that others replace by a rename.

    On NFS the file that was opened may be gone by the time it is read ("stale file handle"): the new one is read then.
    """
    for _ in range(STALE_TRIES):
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_bytes()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, none where there is no file. Damaged lines are passed over with a
    warning.

    A last line without its end is being written, or was never finished: it is left out.
    """
    if not path.is_file():
        return []
    return parse_json_lines(read_replaced(path), path)


def parse_json_lines(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the objects of the complete lines in `content`, which is of `path`."""
    found = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        value = json_object(line)
        if value is not None:
            found.append(value)
        elif line.strip():
            warn_once(f"{path}: line {number} is damaged and passed over: {line[:60].decode(errors='replace')!r}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file that only shows things; empty where there is none, and with a warning where it is
    damaged.
    """
    try:
        value = json_object(read_replaced(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if value is None:
        warn_once(f"{path} is damaged and passed over")
    return value or {}


def fitting(data: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with the keys and types of `example`; its values replace missing ones and those of a wrong type.

    Numbers may be whole or not, but finite; where the example is None, any text or None fits.
    """
    found = {}
    for key, usual in example.items():
        value = data.get(key, usual)
        if isinstance(usual, int | float):
            fits = is_number(value)
        else:
            fits = isinstance(value, str | None if usual is None else type(usual))
        found[key] = value if fits else usual
    return found


def is_number(value: Any) -> bool:
    """Return whether a value of a file is a number that a float can hold; NaN, true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_damaged(path: Path) -> bool:
    """Return whether `path` should hold a JSON object and does not."""
    return path.is_file() and json_object(path.read_bytes()) is None


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder, so that no code reads it again; nothing of it is deleted."""
    for number in itertools.count(1):
        target = path.with_name(f"{path.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not target.exists():
            break
    path.rename(target)
    return target


def json_object(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object that `content` is; None where it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # UnicodeDecodeError too
        return None
    return value if isinstance(value, dict) else None


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Print a warning once: displays read the same file again and again."""
    if text not in _warned:
        _warned.add(text)
        with suppress(OSError):  # a log on a full disk
            print(f"Warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def parquet_writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer of tables of `schema` to the file `path`, which is there when the block ends; after an error the old one
    is.
    """
    import pyarrow.parquet as pq  # takes a while, and most who write files write no Parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        yield writer


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write `table` as Parquet, whole or not at all; the folder is made."""
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table)
