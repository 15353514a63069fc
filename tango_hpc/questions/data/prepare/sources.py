"""Records of a data set, one at a time, from a local file, a local folder or a hub data set."""

from __future__ import annotations

import fnmatch
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from tango_hpc.base.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".json")
COMPRESSIONS = (".gz", ".zst", ".bz2")  # of JSON and JSON lines
# What the hub, `datasets` and its exports lay beside the data.
METADATA_FILES = {"dataset_infos.json", "dataset_info.json", "state.json", "croissant.json", "dataset_dict.json"}
_BATCH_ROWS = 512  # of Parquet held at a time: Eurus rows carry prompts of several kB


def find_files(source: str, patterns: Sequence[str]) -> list[Path]:
    """Return the data files of `source`, sorted by path: one file, or all in a folder whose relative path fits a
    pattern.

    A `source` that is no path is a hub data set `owner/name`, whose fitting files are downloaded first (the hub's
    cache keeps them). Patterns are those of `fnmatch`, on the path below the folder; the first that fits any file
    decides, so `*test*` before `*` prefers a test split and accepts a folder without splits.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if _kind(path) is None:
            raise UserError(
                f"{path}: cannot read {path.suffix or 'a file without suffix'}; give {', '.join(SUFFIXES)} (JSON also"
                f" as {', '.join(COMPRESSIONS)})"
            )
        return [path]
    folder = path if path.is_dir() else download(source, "dataset", lambda: patterns)
    files = sorted(file for file in folder.rglob("*") if _is_data(file, folder))
    names = [file.relative_to(folder).as_posix() for file in files]
    for pattern in patterns:
        if fitting := fnmatch.filter(names, pattern):
            return [folder / name for name in fitting]
    present = ", ".join(names[:8]) or "no data files at all"
    raise UserError(f"{source} has no file like {' or '.join(patterns)}; it has {present} (--split chooses)")


def _kind(file: Path) -> str | None:
    """Return the suffix that says how a file is read, without that of its compression; None for other files."""
    kind = file.with_suffix("").suffix if file.suffix in COMPRESSIONS else file.suffix
    return kind if kind in SUFFIXES and not (kind == ".parquet" and file.suffix != kind) else None


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return _kind(file) is not None and not hidden and file.name not in METADATA_FILES and file.is_file()


def _open_text(file: Path) -> TextIO:
    """Open a text file, compressed or not, without a byte-order mark."""
    return io.TextIOWrapper(pa.input_stream(str(file), compression="detect"), encoding="utf-8-sig")


def read_records(files: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every record of `files` in order, with the file that it stands in. Parquet and JSON lines are streamed."""
    for file in files:
        if _kind(file) == ".parquet":
            records = _read_parquet(file)
        elif _kind(file) == ".jsonl":
            records = _read_lines(file)
        else:
            records = _read_json(file)
        try:
            for record in records:
                yield file, record
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not text in UTF-8 ({error})") from None
        except OSError as error:
            raise UserError(f"{file} cannot be read, or was not downloaded whole: {error}") from None


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file} as Parquet: {error}") from None


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    with _open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _record(file, number, line)


def _record(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}, line {number}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{file}, line {number}: a {type(record).__name__}, not an object with fields")
    return record


def _read_json(file: Path) -> Iterator[dict[str, Any]]:
    """Yield an array of objects, or JSON lines under the wrong name."""
    with _open_text(file) as stream:
        first = stream.read(1024).lstrip()[:1]
    if first == "{":
        yield from _read_lines(file)
        return
    try:
        with _open_text(file) as stream:
            records = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{file} must hold an array of objects, one for each record")
    yield from records


def download(source: str, kind: Literal["dataset", "model"], patterns: Callable[[], Sequence[str]]) -> Path:
    """Download the files of hub repository `source` that fit `patterns`; return their folder in the hub's cache.

    Raises `UserError` for a `source` that is not of the form owner/name, and where the hub cannot be reached.
    """
    if source.count("/") != 1 or source.startswith((".", "/", "~")) or Path(source).exists():
        local, remote = ("folder", "model") if kind == "model" else ("file or folder", "data set")
        raise UserError(f"no {local} at {source}; give one, or a hub {remote} as owner/name")
    from huggingface_hub import snapshot_download

    try:
        wanted = list(patterns())
        ignored = ["original/*"] if kind == "model" else None  # a second copy of the weights
        return Path(snapshot_download(source, repo_type=kind, allow_patterns=wanted, ignore_patterns=ignored))
    except Exception as error:  # without internet, the errors of the hub's HTTP library
        raise UserError(
            f"{source} is no local path, and the hub {kind} of that name cannot be downloaded: {error}\n"
            "Compute nodes often have no internet: download it on a login node and give the folder."
        ) from None
