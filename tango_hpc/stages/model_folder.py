"""The model folders that a stage starts from. Imports neither torch nor vLLM: it runs on login nodes."""

from __future__ import annotations

import getpass
import shlex
from pathlib import Path

from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import indexed_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model_folder(path: Path, hint: str = "") -> None:
    """Raise `UserError` unless `path` is a Hugging Face folder with weights and a tokenizer that this user can read."""
    try:
        if not path.is_dir():
            raise UserError(f"no model folder at {path}{hint}")
        index = path / "model.safetensors.index.json"
        weights = indexed_files(index) if index.is_file() else ["model.safetensors"]
        tokenizer = [name for name in TOKENIZER_FILES if (path / name).is_file()] or TOKENIZER_FILES[:1]
        missing = []
        for name in ("config.json", *weights, *tokenizer):
            try:
                with (path / name).open("rb") as file:
                    file.read(1)
            except FileNotFoundError:
                missing.append(name)
    except PermissionError as error:
        raise UserError(
            f"{error.filename} cannot be read by {getpass.getuser()}, as whom the job will run: permission denied; have"
            f" its owner open it: chmod -R a+rX {shlex.quote(str(path))}, and a+x for the folders above"
        ) from None
    if missing:
        raise UserError(f"the model folder {path} lacks {', '.join(missing)}")
