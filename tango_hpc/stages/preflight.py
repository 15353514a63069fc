"""What is looked at before any process starts: do the files that a stage reads exist, with what it needs in them?

Imports neither torch nor vLLM: it runs in the command itself and on login nodes.
"""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from tango_hpc.base.config import Config
from tango_hpc.base.config.schema import SftRoleConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import indexed_files
from tango_hpc.base.run.trackers import missing_trackers
from tango_hpc.questions.data.prepare.pipeline import check_held_out
from tango_hpc.questions.data.tables import QUESTION_COLUMNS, SFT_COLUMNS, check_ids, check_table
from tango_hpc.questions.tasks.made_files import check_made_files, recipes
from tango_hpc.questions.tasks.own import check_own_task
from tango_hpc.stages.eval_inputs import evaluated_checkpoints, evaluated_columns, evaluated_file, evaluated_roles

NODE_LOCAL = ("/tmp", "/dev/shm", "/var/tmp", "/run")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_inputs(config: Config, stage: str, *, after: Sequence[str] = ()) -> None:
    """Raise one `UserError` with all that is wrong with the files that `stage` reads.

    What the stages of `after` will have written by then need not be there yet.
    """
    problems: list[str] = missing_trackers(config.run.trackers)
    to_come = _outputs(config, after)

    def note(check: Callable[..., object], path: Path, *arguments: object) -> None:
        if path in to_come:
            return
        try:
            check(path, *arguments)
        except UserError as error:
            problems.append(str(error))

    if config.task.file is not None:
        check_own_task(config)
    makes: set[Path] = set()
    if stage in ("sft", "train", "eval"):
        makes = set(recipes(config))
        problems += check_made_files(config)
    if stage == "sft":
        if not _sft_roles(config):
            problems.append("the config names nothing to fine-tune; add sft.generator or sft.verifier")
        made: set[Path] = set()
        for role, settings in _sft_roles(config).items():
            if settings.data not in makes or settings.data.exists():
                note(check_table, settings.data, SFT_COLUMNS[role])
            is_made = settings.init.build is not None or settings.init.path in made
            if not is_made or settings.init.path.exists():
                note(check_model_folder, settings.init.path)
            made.add(settings.output)
    elif stage == "train":
        for path in (config.data.train, config.data.eval):
            if path not in makes or path.exists():
                note(check_table, path, QUESTION_COLUMNS)
        if config.data.train.is_file() and config.data.eval.is_file():
            note(lambda path: check_held_out(path, config.data.eval), config.data.train)
        for name, trained in config.roles.items():
            hint = "; `tango sft CONFIG` writes it" if getattr(config.sft, name) else ""
            note(check_model_folder, trained.model.path, hint)
            if trained.model.reference_path is not None:
                note(check_model_folder, trained.model.reference_path)
    elif stage == "eval":
        checkpoints_of = config.eval.checkpoints_of or config.run.dir
        note(lambda _: evaluated_checkpoints(config), checkpoints_of)
        for name in config.eval.benchmarks:
            file = evaluated_file(config, name)
            if file not in makes or file.exists():
                note(check_table, file, evaluated_columns(name))
                note(check_ids, file)
        for name in evaluated_roles(config):
            note(check_model_folder, config.roles[name].model.path)
    elif stage == "teacher":
        if config.teacher is None:
            problems.append("the config has no teacher section; it names the questions and the folder to write")
        else:
            note(check_table, config.teacher.questions, QUESTION_COLUMNS)
        note(check_model_folder, config.generator.model.path)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))  # a file that several checks open has one fault


def node_local_paths(config: Config) -> list[str]:
    """Keys of the config's files and folders that lie where usually every node has a disk of its own."""
    named = {"run.dir": config.run.dir, "data.train": config.data.train, "data.eval": config.data.eval}
    named |= {f"{name}.model.path": role.model.path for name, role in config.roles.items()}
    return [key for key, path in named.items() if is_node_local(path)]


def is_node_local(path: Path) -> bool:
    """Whether `path` lies in a folder that is each node's own, by its name."""
    return any(path.resolve().is_relative_to(folder) for folder in NODE_LOCAL)


def _outputs(config: Config, stages: Sequence[str]) -> set[Path]:
    """What `stages` write for later ones: model folders, data sets, runs with checkpoints."""
    outputs: set[Path] = set()
    if "sft" in stages:
        outputs |= {settings.output for settings in _sft_roles(config).values()}
    if "train" in stages:
        outputs.add(config.run.dir)
    if "teacher" in stages and config.teacher is not None:
        outputs |= {config.teacher.output / name for name in ("train.parquet", "test.parquet")}
    return outputs


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
            f"{error.filename} cannot be read by {getpass.getuser()}, as whom the job will run: permission denied; have "
            f"its owner open it: chmod -R a+rX {shlex.quote(str(path))}, and a+x for the folders above"
        ) from None
    if missing:
        raise UserError(f"the model folder {path} lacks {', '.join(missing)}")


def _sft_roles(config: Config) -> dict[str, SftRoleConfig]:
    both = {"generator": config.sft.generator, "verifier": config.sft.verifier}
    return {role: settings for role, settings in both.items() if settings is not None}
