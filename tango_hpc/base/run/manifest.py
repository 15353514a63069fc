"""manifest.json of a checkpoint: size and checksum (CRC-32) of each of its files. It is written last. No torch.

A checkpoint is intact if its manifest is there and every file is what it says. CRC-32 finds every flipped bit and all
but one in 4e9 other damages; it does not protect against forgery.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isal.isal_zlib import crc32  # zlib's values, several times as fast

from tango_hpc.base.files import write_atomically

NAME = "manifest.json"
BLOCK_BYTES = 4 * 2**20
# A checksum of less than this is computed sooner than handed to another thread.
BESIDE_BYTES = 2**16


@dataclass(frozen=True)
class FileSum:
    """The size of a file in bytes, and its CRC-32."""

    size: int
    crc32: int


def write_manifest(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the manifest of `folder`; `sums` by path below it."""
    files = {name: asdict(sums[name]) for name in sorted(sums)}
    write_atomically(folder / NAME, json.dumps({"files": files}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """Return the files that `folder` must have. Raises ValueError, in words, where the manifest is missing or
    damaged.
    """
    try:
        files = json.loads((folder / NAME).read_bytes())["files"]
        return {name: FileSum(int(entry["size"]), int(entry["crc32"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise ValueError(f"{NAME} is missing") from None
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{NAME} is damaged") from None


def total_bytes(folder: Path) -> int | None:
    """Return the bytes of all files of a checkpoint; None where its manifest does not say."""
    try:
        return sum(entry.size for entry in read_manifest(folder).values())
    except ValueError:
        return None


def wrong_sizes(folder: Path, sums: Mapping[str, FileSum]) -> Iterator[str]:
    """Return the faults of the files that their names and sizes show."""
    for name, expected in sums.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
        else:
            if size != expected.size:
                yield f"{name} is empty" if not size else f"{name} has {size:,} of {expected.size:,} bytes"


def wrong_contents(folder: Path, sums: Mapping[str, FileSum]) -> Iterator[str]:
    """Return the faults of the contents of the files; this reads all of them."""
    for name, expected in sums.items():
        try:
            found = sum_of(folder / name)
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"
        else:
            if found != expected:
                yield f"{name} is not what was written (checksum {found.crc32:08x} instead of {expected.crc32:08x})"


def find_damage(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return the fault of a checkpoint, or of its `wanted` files; None where they are intact."""
    try:
        sums = {name: entry for name, entry in read_manifest(folder).items() if wanted(name)}
    except ValueError as error:
        return str(error)
    return listed(wrong_sizes(folder, sums)) or listed(wrong_contents(folder, sums))


def listed(problems: Iterable[str]) -> str | None:
    """Return the first problems, in one line."""
    found = list(problems)
    more = f" and {len(found) - 3} more files" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more if found else None


def sum_of(path: Path) -> FileSum:
    """Return size and checksum of a file, read block by block."""
    size, crc = 0, 0
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            size, crc = size + length, crc32(memoryview(block)[:length], crc)
    return FileSum(size, crc)


class SummedFile:
    """A new file to write, whose checksum is computed at the same time, in another thread."""

    def __init__(self, path: Path, beside: ThreadPoolExecutor) -> None:
        self.path = path
        self.error: OSError | None = None  # the first that writing met; torch.save tells of it without its number
        self._file = path.open("wb")
        self._beside = beside
        self._size, self._crc = 0, 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        if len(data) < BESIDE_BYTES:
            self._crc = crc32(data, self._crc)
            self._write(data)
        else:
            crc = self._beside.submit(crc32, data, self._crc)
            try:
                self._write(data)
            finally:
                self._crc = crc.result()  # `data` is the caller's again
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """Return bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Hand everything to the system."""
        self._keeping_error(self._file.flush)

    def close(self) -> FileSum:
        """Wait for the disk; what was written."""
        self.flush()
        self._keeping_error(lambda: os.fsync(self._file.fileno()))
        self._file.close()
        return FileSum(self._size, self._crc)

    def abandon(self) -> None:
        """Close it after an error."""
        with suppress(OSError):  # what is still in the buffer cannot be written either
            self._file.close()

    def _write(self, data: bytes | memoryview) -> None:
        self._keeping_error(lambda: self._file.write(data))

    def _keeping_error(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.error = self.error or OSError(error.errno, error.strerror, str(self.path))
            raise self.error from error


@contextmanager
def summed_file(path: Path) -> Iterator[SummedFile]:
    """Open a `SummedFile` at `path` and close it at the end of the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as beside:
        file = SummedFile(path, beside)
        try:
            yield file
        except BaseException:
            file.abandon()
            raise
