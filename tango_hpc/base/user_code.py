"""Python files of a user's: a task, or a part of the method. A mistake in one is reported with its file and line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tango_hpc.base.errors import UserError


def read_source(file: str) -> str:
    """Return the text of a Python file. Raises `UserError` where it is none."""
    try:
        return importlib.util.decode_source(Path(file).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as Python: {error}") from error


def run_source(file: str, source: str, name: str) -> types.ModuleType:
    """Return the module `name` that `source` makes, which `file` held. Raises `UserError` for a mistake in it."""
    module = types.ModuleType(name)
    vars(module)["__file__"] = file
    sys.modules[name] = module  # where dataclasses look for the names in their annotations
    with mistakes_in(file):
        exec(compile(source, file, "exec"), vars(module))
    return module


@contextmanager
def mistakes_in(file: str, prefix: str = "") -> Iterator[None]:
    """Turn any exception of the file's code into one `UserError` with the line of the file."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise  # the worker's limit
    except (Exception, SystemExit) as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)  # whose own text repeats the place
        raise UserError(f"{prefix}{_place(file, error)}{type(error).__name__}: {text}") from error


def _place(file: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}, line {error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {frames[-1].lineno}, in {frames[-1].name}: " if frames else f"{file}: "
