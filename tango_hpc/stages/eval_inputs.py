"""The inputs of an evaluation: files, checkpoints, roles. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tango_hpc.base.config import Config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.questions.data.prepare.rows import SCHEMA
from tango_hpc.questions.data.tables import QUESTION_COLUMNS

AS_THEY_ARE = "model"


def evaluated_file(config: Config, name: str) -> Path:
    """Return the Parquet file of benchmark `name`; the benchmark "task" asks the run's own held-out questions."""
    return config.data.eval if name == "task" else config.eval.data / f"{name}.parquet"


def evaluated_columns(name: str) -> tuple[str, ...]:
    """Return the columns that its file must have."""
    return QUESTION_COLUMNS if name == "task" else tuple(SCHEMA.names)


def evaluated_roles(config: Config) -> list[str]:
    """Return the models that are loaded: the generator unless only the verifier is asked, the verifier where it is of
    use.
    """
    roles = ["generator"] if set(config.eval.benchmarks) != {"processbench"} else []
    if config.verifier is not None and (config.eval.use_verifier or "processbench" in config.eval.benchmarks):
        roles.append("verifier")
    return roles


def evaluated_checkpoints(config: Config) -> list[Path]:
    """Return training checkpoints to evaluate, in order; empty where the models are evaluated as they are.

    Without `eval.checkpoints_of` they are the run's own, if it has any. Raises `UserError` if the run that is named
    has none.
    """
    run = config.eval.checkpoints_of or config.run.dir
    found = list(training_checkpoints(run).values())
    if not found and config.eval.checkpoints_of is not None:
        raise UserError(f"eval.checkpoints_of: {run} holds no training checkpoints")
    return found[-1:] if config.eval.checkpoints == "last" else found


def evaluated_models(config: Config) -> dict[str, Path | None]:
    """Return what is evaluated by the name of its folder of answers: checkpoints, or the models as they are (None)."""
    checkpoints = evaluated_checkpoints(config)
    return {path.name.partition("+")[0]: path for path in checkpoints} if checkpoints else {AS_THEY_ARE: None}


def answers_file(folder: Path, label: str, name: str) -> Path:
    """Return where the answers of a model to benchmark `name` are, below a run's `eval` folder."""
    return folder / label / f"{name}.parquet"


def unanswered(config: Config, labels: Iterable[str]) -> list[tuple[str, str]]:
    """Return (model, benchmark) pairs, in order, to which the run has no answers yet."""
    folder = config.run.dir / "eval"
    units = ((label, name) for label in labels for name in config.eval.benchmarks)
    return [unit for unit in units if not answers_file(folder, *unit).is_file()]


def was_trained_since(config: Config) -> bool:
    """Return whether there are checkpoints that an evaluation which is done has not asked."""
    try:
        models = evaluated_models(config)
    except UserError:  # they are gone
        return False
    return AS_THEY_ARE not in models and bool(unanswered(config, models))


def training_checkpoints(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a training run, in order, by the number of steps done.

    A checkpoint within a step, from a stop there, counts as well: it has the same weights.
    """
    found: dict[int, Path] = {}
    for name, path in steps_in(run / "checkpoints/train"):
        found.setdefault(name.step, path)
    return found
