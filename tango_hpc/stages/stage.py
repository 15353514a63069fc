"""The stages of a run: fine-tuning, training, evaluation and the teacher, each an object with the answers that others
ask.

A stage is a `runner.program.Program`. Only this folder knows the stages apart by name. Imports neither torch nor vLLM:
login nodes and the supervisor use it. `load` imports what the processes of a rank need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError
from rich.console import Console

from tango_hpc.base.config import Config
from tango_hpc.base.config.load import read_tree
from tango_hpc.base.config.paths import NO_TEMPLATE_FILE
from tango_hpc.base.config.schema import TeacherConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.trackers import missing_trackers
from tango_hpc.plan.disk import note_on_disk
from tango_hpc.plan.memory import MemoryPlan, copied_in_fine_tuning, plan_memory
from tango_hpc.plan.sizes import GPU_PROCESS_BYTES, SAVE_BYTES
from tango_hpc.questions.data.prepare.pipeline import check_held_out
from tango_hpc.questions.data.tables import QUESTION_COLUMNS, check_ids, check_sft_table, check_table
from tango_hpc.questions.tasks.made_files import check_made_files, make_missing_files, recipes
from tango_hpc.questions.tasks.own import check_own_task
from tango_hpc.report.live_view import ProgressView
from tango_hpc.runner.attempts import newest_checkpoint
from tango_hpc.runner.program import Program, View
from tango_hpc.stages.eval_inputs import (
    evaluated_checkpoints,
    evaluated_columns,
    evaluated_file,
    evaluated_roles,
    was_trained_since,
)
from tango_hpc.stages.method_files import check_method, keep_method
from tango_hpc.stages.model_folder import check_adapter, check_files, check_model

if TYPE_CHECKING:
    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.runner.process import RankProcess

TRAINER = "trainer"  # the one process of a rank that fine-tunes: the roles take turns in it, without an engine


class Stage:
    """The common part of all stages. A subclass names itself and answers the rest."""

    name: str
    saves = "result"
    rank_module = "tango_hpc.stages.rank"
    job_module = "tango_hpc.stages.job"
    function: str  # "module:name"; every process of a rank calls it with (config, directory, process, exchange)
    has_engine = True
    trains = False  # with the schedule, the batches and the checkpoints of `train`
    takes_checkpoints = False  # a role's weights may come from checkpoints, one after the other

    def is_configured(self, config: Config) -> bool:
        """Return whether the config says what this stage is to do."""
        return True

    def roles(self, config: Config) -> list[str]:
        """Return the roles that have a process on each rank: of a model that takes both, the first."""
        return list(dict.fromkeys(config.model_of(name) for name in self.asked(config)))

    def asked(self, config: Config) -> list[str]:
        """Return the roles that write responses."""
        raise NotImplementedError

    def inputs(self, config: Config) -> Iterator[tuple[str, Path]]:
        """Return the data, models, prompts and code that the stage computes from, by the key that names each."""
        if config.task.is_own:
            yield "task.name", Path(config.task.name)
        yield from self._inputs(config)

    def _inputs(self, config: Config) -> Iterable[tuple[str, Path]]:
        raise NotImplementedError

    def outputs(self, config: Config) -> set[Path]:
        """Return what the stage writes for later ones: model folders, data sets, a run with checkpoints."""
        return set()

    def check_inputs(self, config: Config, after: Sequence[Program] = ()) -> None:
        """Raise one `UserError` with all that is wrong with the inputs, which `after` may still have to write."""
        to_come = {path for stage in after for path in stage_named(stage.name).outputs(config)}
        found = InputProblems(missing_trackers(config.run.trackers), to_come)
        if config.task.file is not None:
            check_own_task(config)
        self._check_inputs(config, found)
        if found.problems:
            raise UserError("\n".join(dict.fromkeys(found.problems)))  # a file that several checks open has one fault

    def _check_inputs(self, config: Config, found: InputProblems) -> None:
        raise NotImplementedError

    def make_inputs(self, config: Config) -> None:
        """Write the data files that the task makes and that do not exist yet."""
        make_missing_files(config)

    def check_disk(self, directory: RunDirectory, config: Config) -> str | None:
        """Return None: results are small."""
        return None

    def progress(self, directory: RunDirectory) -> str | None:
        """Return the number of result files and their bytes; None where there is none."""
        folder = self._results(directory)
        sizes = [file.stat().st_size for file in folder.rglob("*.parquet") if file.is_file()] if folder else []
        return f"{len(sizes)} files of results, {sum(sizes):,} bytes" if sizes else None

    def _results(self, directory: RunDirectory) -> Path | None:
        return None

    def has_more_to_do(self, config: Config) -> bool:
        """Return whether the stage, once done, has got new inputs since."""
        return False

    def view(self, directory: RunDirectory, console: Console) -> AbstractContextManager[View]:
        """Return the display of a run."""
        return ProgressView(directory, console)

    def taking_part(self, config: Config) -> Config:
        """Return `config` with the roles of this stage alone, none of which it trains."""
        frozen = {"trainable": False}
        generator, verifier = config.generator.model_copy(update=frozen), None
        if config.verifier is not None and "verifier" in self.asked(config):
            verifier = config.verifier.model_copy(update=frozen)
        return config.model_copy(update={"generator": generator, "verifier": verifier})

    def node_bytes(self, config: Config) -> int:
        """Return the host memory that the stage needs on a node with GPUs at its fullest moment, in bytes.

        Raises UserError where a model's sizes are not known.
        """
        plan = self.memory(self.taking_part(config))
        return max(phase.total for phase in plan.node)

    def memory(self, config: Config) -> MemoryPlan:
        """Return the memory of the roles of `config` in this stage, without what a weight sync holds."""
        return plan_memory(config, gpu_gb=0, node_gb=None, sync_bytes={}, takes_checkpoints=self.takes_checkpoints)

    def load(self, device: Literal["cpu", "cuda"]) -> StageFunction:
        """Import what the stage's processes need, vLLM included, and return the function that each of them calls."""
        if self.has_engine:
            import_module("tango_hpc.models.engine.engine").import_vllm(device)
        module, _, name = self.function.partition(":")
        function: StageFunction = getattr(import_module(module), name)
        return function


StageFunction = Callable[[Config, RunDirectory, "RankProcess", "Exchange"], None]


class InputProblems:
    """The faults of inputs, found one after the other, and the files that need not exist yet."""

    def __init__(self, problems: list[str], to_come: set[Path]) -> None:
        self.problems, self.to_come = problems, to_come
        self.made: set[Path] = set()

    def may_be_made(self, config: Config) -> None:
        """Let the files be missing that the task makes; note those that exist and were made with other settings."""
        self.made = set(recipes(config))
        self.problems += check_made_files(config)

    def note(self, check: Callable[..., object], path: Path, *arguments: object) -> None:
        """Call `check(path, *arguments)` and note its `UserError`, unless an earlier stage writes `path`."""
        if path in self.to_come:
            return
        try:
            check(path, *arguments)
        except UserError as error:
            self.problems.append(str(error))

    def note_table(self, path: Path, columns: Sequence[str]) -> None:
        """Note what is wrong with a Parquet file that must have `columns`; one that the task makes may be missing."""
        if path not in self.made or path.exists():
            self.note(check_table, path, columns)


class SavesSteps(Stage):
    """A stage of optimizer steps, which saves checkpoints."""

    saves = "checkpoint"

    def progress(self, directory: RunDirectory) -> str | None:
        """Return the name of the newest checkpoint."""
        return newest_checkpoint(directory, self.name)

    def check_disk(self, directory: RunDirectory, config: Config) -> str | None:
        """Return a warning where the disk has no room for all checkpoints; raise `UserError` where not one fits."""
        try:
            one, weights = self.saved_bytes(config)
        except UserError:  # sizes are not known; what reads the model says so
            return None
        return note_on_disk(directory, self.name, config.checkpoint, one, weights)

    def saved_bytes(self, config: Config) -> tuple[int, int]:
        """Return the bytes of the largest checkpoint, of all ranks together, and of one kept as weights alone.

        The second is 0 where none is kept so. Raises UserError where a model's sizes are not known.
        """
        raise NotImplementedError


class Sft(SavesSteps):
    """`tango sft`: fine-tunes the roles of the config's `sft` section."""

    name = "sft"
    function = "tango_hpc.stages.sft:fine_tune"
    has_engine = False

    def is_configured(self, config: Config) -> bool:
        return bool(config.sft.models)

    def roles(self, config: Config) -> list[str]:
        return [TRAINER]

    def asked(self, config: Config) -> list[str]:
        return []

    def _inputs(self, config: Config) -> Iterator[tuple[str, Path]]:
        made: set[Path] = set()
        for name, settings in config.sft.models.items():
            for role, data in config.sft.data_of(name).items():
                yield f"sft.{role}.data", data
                yield from _prompt_files(config, role)
            if settings.init.build is None and settings.init.path not in made:
                yield f"sft.{name}.init.path", settings.init.path
            made.add(settings.output)

    def outputs(self, config: Config) -> set[Path]:
        return {settings.output for settings in config.sft.models.values()}

    def _check_inputs(self, config: Config, found: InputProblems) -> None:
        found.may_be_made(config)
        if not config.sft.models:
            found.problems.append("the config names nothing to fine-tune; add sft.generator or sft.verifier")
        made: set[Path] = set()
        for name, settings in config.sft.models.items():
            for role, data in config.sft.data_of(name).items():
                if data not in found.made or data.exists():
                    found.note(check_sft_table, data, role)
            is_made = settings.init.build is not None or settings.init.path in made
            if not is_made or settings.init.path.exists():
                for role in config.roles_of(name):
                    found.note(check_model, settings.init.path, "", role, config)
                found.note(check_adapter, settings.init.path, name, config)
            made.add(settings.output)

    def node_bytes(self, config: Config) -> int:
        """Return the memory of one process on each rank, whose trainer stays on the GPU."""
        copies = copied_in_fine_tuning(config) if config.checkpoint.background else 0
        return config.launch.tasks_per_node * (GPU_PROCESS_BYTES + SAVE_BYTES) + copies

    def saved_bytes(self, config: Config) -> tuple[int, int]:
        by_role = self.memory(config).checkpoint_bytes  # one role at a time
        return max((size for name, size in by_role.items() if name in config.sft.models), default=0), 0


class Train(SavesSteps):
    """`tango train`: trains generator and verifier by Algorithm 1."""

    name = "train"
    function = "tango_hpc.stages.tango:train"
    trains = True

    def asked(self, config: Config) -> list[str]:
        return list(config.roles)

    def _inputs(self, config: Config) -> Iterator[tuple[str, Path]]:
        yield from (("data.train", config.data.train), ("data.eval", config.data.eval))
        for name, model in config.models.items():
            yield f"{name}.model.path", model.model.path
            if model.model.reference_path is not None:
                yield f"{name}.model.reference_path", model.model.reference_path
            if model.adapter is not None and model.adapter.path is not None:
                yield f"{name}.adapter.path", model.adapter.path
        for name in config.roles:
            yield from _prompt_files(config, name)

    def outputs(self, config: Config) -> set[Path]:
        return {config.run.dir}

    def _check_inputs(self, config: Config, found: InputProblems) -> None:
        found.may_be_made(config)
        data = config.data
        for path in (data.train, data.eval):
            found.note_table(path, QUESTION_COLUMNS)
        if data.train.is_file() and data.eval.is_file():
            found.note(check_held_out, data.train, data.eval)
        found.note(lambda _: check_method(config), config.run.dir)
        for name, role in config.roles.items():
            hint = "; `tango sft CONFIG` writes it" if config.model_of(name) in config.sft.models else ""
            found.note(check_model, role.model.path, hint, name, config)
            found.note(check_adapter, role.model.path, name, config)
            if role.model.reference_path is not None:
                found.note(check_files, role.model.reference_path)

    def make_inputs(self, config: Config) -> None:
        super().make_inputs(config)
        keep_method(config)

    def taking_part(self, config: Config) -> Config:
        """Return `config` as it is."""
        return config

    def saved_bytes(self, config: Config) -> tuple[int, int]:
        plan = self.memory(config)
        weights = sum(plan.weights_bytes.values()) if config.checkpoint.keep_weights else 0
        return sum(plan.checkpoint_bytes.values()), weights


class Eval(Stage):
    """`tango eval`: evaluates models or checkpoints on benchmarks."""

    name = "eval"
    function = "tango_hpc.stages.evaluate:evaluate"
    takes_checkpoints = True

    def asked(self, config: Config) -> list[str]:
        return evaluated_roles(config)

    def _inputs(self, config: Config) -> Iterator[tuple[str, Path]]:
        for benchmark in config.eval.benchmarks:
            yield "data.eval" if benchmark == "task" else f"eval.data.{benchmark}", evaluated_file(config, benchmark)
        with suppress(UserError):  # there are none, which the check of inputs says
            for checkpoint in evaluated_checkpoints(config):
                yield f"eval.checkpoints.{checkpoint.name}", checkpoint  # its manifest knows all of its files
        for name in self.roles(config):
            yield f"{name}.model.path", config.roles[name].model.path
        for name in self.asked(config):
            yield from _prompt_files(config, name)

    def _check_inputs(self, config: Config, found: InputProblems) -> None:
        found.may_be_made(config)
        found.note(lambda _: evaluated_checkpoints(config), config.eval.checkpoints_of or config.run.dir)
        for benchmark in config.eval.benchmarks:
            file = evaluated_file(config, benchmark)
            found.note_table(file, evaluated_columns(benchmark))
            if file not in found.made or file.exists():
                found.note(check_ids, file)
        for name in evaluated_roles(config):
            found.note(check_model, config.roles[name].model.path, "", name, config)
            if not evaluated_checkpoints(config):
                found.note(_refuse_adapter, config.run.dir, name, config)

    def _results(self, directory: RunDirectory) -> Path:
        return directory.path / "eval"

    def has_more_to_do(self, config: Config) -> bool:
        return was_trained_since(config)


class Teacher(Stage):
    """`tango teacher`: a large model writes solutions to fine-tune on."""

    name = "teacher"
    function = "tango_hpc.stages.teacher:teach"

    def is_configured(self, config: Config) -> bool:
        return config.teacher is not None

    def asked(self, config: Config) -> list[str]:
        return ["generator"]

    def _inputs(self, config: Config) -> Iterator[tuple[str, Path]]:
        if config.teacher is not None:
            yield "teacher.questions", config.teacher.questions
        yield "generator.model.path", config.generator.model.path
        yield from _prompt_files(config, "generator")

    def outputs(self, config: Config) -> set[Path]:
        names = ("train.parquet", "test.parquet")
        return {config.teacher.output / name for name in names} if config.teacher is not None else set()

    def _check_inputs(self, config: Config, found: InputProblems) -> None:
        if config.teacher is None:
            found.problems.append("the config has no teacher section; it names the questions and the folder to write")
        else:
            found.note(check_table, config.teacher.questions, QUESTION_COLUMNS)
        found.note(check_model, config.generator.model.path, "", "generator", config)
        found.note(_refuse_adapter, config.run.dir, "generator", config)

    def _results(self, directory: RunDirectory) -> Path | None:
        try:
            return TeacherConfig.model_validate(read_tree(directory.config)["teacher"]).parts
        except (UserError, ValidationError, KeyError):  # a config that is refused has no results
            return None


SFT, TRAIN, EVAL, TEACHER = Sft(), Train(), Eval(), Teacher()
STAGES: dict[str, Stage] = {stage.name: stage for stage in (SFT, TRAIN, EVAL, TEACHER)}


def stage_named(name: str) -> Stage:
    """Return the stage of that name. Raises UserError for a name that no stage has."""
    if name not in STAGES:
        raise UserError(f"there is no stage {name!r}; stages are {', '.join(STAGES)}, several as sft,train")
    return STAGES[name]


def stages_named(names: str) -> list[Stage]:
    """Return the stages of "sft,train". Raises UserError for a name that no stage has."""
    return [stage_named(name) for name in names.split(",")]


def _refuse_adapter(_run: Path, role: str, config: Config) -> None:
    """Raise UserError where a model is asked as it is and has an adapter, which the engine would not see."""
    settings = config.roles[role]
    if settings.adapter is not None and settings.adapter.path is not None:
        raise UserError(
            f"{role}.adapter.path: a model is asked without its adapter where there is no checkpoint; write one with it"
            f" (tango import {settings.model.path} --adapter {settings.adapter.path} --out FOLDER) and name that in"
            f" {role}.model.path"
        )


def _prompt_files(config: Config, name: str) -> Iterator[tuple[str, Path]]:
    """Return the user's files that the prompts of a role are made of."""
    role = config.roles[name]
    if role.prompt is not None:
        yield f"{name}.prompt", role.prompt
    if role.chat_template not in NO_TEMPLATE_FILE:
        yield f"{name}.chat_template", Path(role.chat_template)
