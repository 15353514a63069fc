"""Judges a model folder, once and everywhere: import, plan, submit, doctor, the start of a stage and its processes.

Imports neither torch nor vLLM: it runs on login nodes.
"""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.config.role_prompts import role_prompt
from tango_hpc.base.errors import UserError
from tango_hpc.base.files import read_json
from tango_hpc.base.model_shape import ModelShape, indexed_files
from tango_hpc.base.prompts import FIELDS, OPTIONAL, shipped_prompt, speaks_tags_only, stop_token_ids
from tango_hpc.models.layout.adapter_layout import adapter_layout, adapter_targets
from tango_hpc.models.layout.peft_folder import check_peft_folder
from tango_hpc.models.layout.trainer_layout import megatron_layout

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model(path: Path, hint: str = "", role: str = "", config: Config | None = None) -> None:
    """Raise one `UserError` with all that keeps the Hugging Face folder `path` from being used.

    Its files must be there and readable, its architecture one that the trainer has, its tokens rows of its embedding;
    it must name a token that ends a response. With the name of a `role` and its `config`, its chat template must also
    put the role's prompt.
    """
    check_files(path, hint)
    check_known(path, role, config)


def check_known(path: Path, role: str = "", config: Config | None = None) -> None:
    """Do as `check_model` with the files that are there: to plan, a config.json is enough."""
    problems = model_problems(path) if (path / "config.json").is_file() else []
    if config is not None and _has_tokenizer(path):
        problems += prompt_problems(path, role, config)
    if problems:
        raise UserError(f"the model in {path} cannot be used: {'; '.join(dict.fromkeys(problems))}")


def check_files(path: Path, hint: str = "") -> None:
    """Raise `UserError` unless `path` is a Hugging Face folder with weights and a tokenizer that this user can read."""
    try:
        if not path.is_dir():
            raise UserError(f"no model folder at {path}{hint}")
        index = path / "model.safetensors.index.json"
        weights = indexed_files(index) if index.is_file() else ["model.safetensors"]
        tokenizer = [name for name in TOKENIZER_FILES if (path / name).is_file()] or TOKENIZER_FILES[:1]
        missing: list[str] = []
        dangling: list[str] = []
        for name in ("config.json", *weights, *tokenizer):
            try:
                with (path / name).open("rb") as file:
                    file.read(1)
            except FileNotFoundError:
                (dangling if (path / name).is_symlink() else missing).append(name)
    except PermissionError as error:
        raise UserError(
            f"{error.filename} cannot be read by {getpass.getuser()}, as whom the job will run: permission denied; have"
            f" its owner open it: chmod -R a+rX {shlex.quote(str(path))}, and a+x for the folders above"
        ) from None
    if dangling:
        raise UserError(
            f"{', '.join(dangling)} in the model folder {path}: links to files that are gone, as in a hub cache that"
            " was moved or cleaned; download the model again"
        )
    if missing:
        raise UserError(f"the model folder {path} lacks {', '.join(missing)}")


def check_adapter(path: Path, role: str, config: Config) -> None:
    """Raise `UserError` with what keeps a role's adapter from being added to the model in `path`, or from starting as
    `adapter.path` says.
    """
    settings = config.roles[role]
    if settings.adapter is None or not (path / "config.json").is_file():
        return
    try:
        shape = ModelShape.from_hf_config(read_json(path / "config.json"))
    except UserError:
        return  # said of the model
    try:
        targets = adapter_targets(shape, settings.adapter.target_modules)
        for tensor_rank in range(settings.parallel.tensor):
            weights = megatron_layout(shape, settings.parallel.tensor, 1, tensor_rank, 0)
            adapter_layout(shape, settings.adapter.rank, targets, weights)
    except UserError as error:
        raise UserError(f"{role}.adapter.target_modules: {error}") from None
    if settings.adapter.path is not None:
        try:
            check_peft_folder(settings.adapter, shape)
        except UserError as error:
            raise UserError(f"{role}.adapter.path: {error}") from None


def model_problems(path: Path) -> list[str]:
    """Return all that keeps a model from being trained and asked, as far as its files are there."""
    problems = []
    config = read_json(path / "config.json")
    try:
        ModelShape.from_hf_config(config)
    except UserError as error:
        problems.append(str(error))
    if _has_tokenizer(path):
        problems += _tokenizer_problems(path, config)
    return problems


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _tokenizer_problems(path: Path, config: dict[str, Any]) -> Iterator[str]:
    try:
        tokenizer = _tokenizer(path)
    except UserError as error:
        yield str(error)
        return
    rows = config.get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if isinstance(rows, int) and largest >= rows:
        names = [token for token, i in tokenizer.get_vocab().items() if i >= rows]
        yield (
            f"its tokenizer has tokens up to {largest}, and its embedding only {rows} rows: {len(names)} tokens, such"
            f" as {min(names)!r}, have no weights (resize_token_embeddings of transformers adds rows, or take the"
            " tokens out of tokenizer.json)"
        )
    try:
        stop_token_ids(tokenizer, path)
    except UserError:
        yield (
            "no token ends its responses: set eos_token in tokenizer_config.json, or eos_token_id in"
            " generation_config.json"
        )


def prompt_problems(path: Path, role: str, config: Config | None = None) -> list[str]:
    """Return why the chat template of a model cannot put a role's prompt; by the shipped one without a `config`.

    The prompt is rendered, and must contain the system's text and every field.
    """
    try:
        tokenizer = _tokenizer(path, config.roles[role].chat_template if config is not None else "auto")
        if speaks_tags_only(tokenizer):
            return []
        prompt = shipped_prompt(role) if config is None else role_prompt(config, role)
        template = prompt.template(tokenizer)
    except UserError as error:
        return [str(error)]
    lost = [f"the {name}" for name in FIELDS[role] if name not in template.parts[1::2] and name not in OPTIONAL]
    if prompt.system is not None and prompt.system.strip() not in "".join(template.parts[::2]):
        lost.insert(0, "the system message")
    if not lost:
        return []
    return [
        f"its chat template drops {' and '.join(lost)} of the {role}'s prompt; give another template"
        f" ({role}.chat_template: a file, or none)"
        + (f", or a prompt without a system message ({role}.prompt)" if lost == ["the system message"] else "")
    ]


def _tokenizer(path: Path, chat_template: str = "auto") -> Any:
    """Return the tokenizer of a folder. Raises UserError where it cannot be read, or cannot say where tokens stand."""
    from tango_hpc.questions.protocol.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path, chat_template)
    except Exception as error:  # of tokenizers or transformers, by what is wrong with the files
        raise UserError(f"its tokenizer cannot be read: {error}") from None
    if not tokenizer.is_fast:
        raise UserError(
            "its tokenizer is no fast one: save it once with transformers' AutoTokenizer, so that there is a"
            " tokenizer.json"
        )
    return tokenizer
