"""The `tango` command. Each command imports what it needs when it runs, so that `--help` is instant.

Exit codes: 0 done, 2 bad input, 1 failure, 85 stopped and resumable, 78 a check failed in a running job,
75 a node kept one from starting.
"""

from __future__ import annotations

import errno
import os
import pwd
import sys
from pathlib import Path
from typing import Annotated

import typer

from tango_hpc.base.errors import CheckFailed, StoppedEarly, UserError
from tango_hpc.base.files import explain_disk, is_of_disk
from tango_hpc.base.formats import visible
from tango_hpc.commands import plan as plan_commands
from tango_hpc.commands import reports as report_commands
from tango_hpc.commands import runs as manage_commands
from tango_hpc.commands.arguments import ConfigFile, Overrides, Resume, RunDir

app = typer.Typer(
    name="tango",
    help="Train a reasoning model against a verifier that learns with it (RL Tango), on Slurm or on a laptop.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _run_here(stage: str, config: Path, overrides: list[str] | None, resume: bool) -> None:
    from tango_hpc.runner.local import run_foreground
    from tango_hpc.stages.stage import STAGES

    raise typer.Exit(run_foreground(STAGES[stage], config, overrides or [], resume=resume))


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Fine-tune the models that the config's `sft` section names.

    Example: `tango sft configs/quickstart.yaml seed=1`
    """
    _run_here("sft", config, overrides, resume)


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train generator and verifier by Algorithm 1.

    Example: `tango sft configs/quickstart.yaml`, then `tango train configs/quickstart.yaml`
    """
    _run_here("train", config, overrides, resume)


@app.command(name="eval")
def evaluate(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Evaluate a model on benchmarks: a run's checkpoints or a Hugging Face folder.

    Example: `tango eval configs/paper/eval.yaml eval.checkpoints_of=null generator.model.path=models/mine`
    """
    from tango_hpc.base.config.load import read_run_dir
    from tango_hpc.runner.local import run_foreground
    from tango_hpc.stages.stage import EVAL

    code = run_foreground(EVAL, config, overrides or [], resume=resume)
    table = read_run_dir(config, overrides or []) / "eval/results.md"
    if code == 0 and table.is_file():
        typer.echo(f"{table.read_text()}\nanswers to read: {table.with_name('answers.html')}")
    raise typer.Exit(code)


@app.command()
def teacher(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Generate fine-tuning data: a large model solves questions, and its right solutions are kept.

    Example: `tango teacher configs/paper/teacher.yaml teacher.num_shards=8 teacher.shard=0`
    """
    _run_here("teacher", config, overrides, resume)


@app.command()
def score(
    dump: Annotated[Path, typer.Argument(metavar="DUMP.parquet", help="A file of a run's rollouts folder.")],
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with the algorithm and the task.")],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write, with the dump's columns.")],
    overrides: Overrides = None,
) -> None:
    """Recompute rewards and advantages of saved rollouts from their texts, without a model or a GPU.

    Example: `tango score runs/quickstart/rollouts/generator_step_000041.parquet configs/quickstart.yaml --out
    new.parquet`
    """
    from tango_hpc.base.config import load_config
    from tango_hpc.stages.rescore import score_dump

    result = score_dump(dump, load_config(config, overrides or []), out)
    typer.echo(
        f"{result.num_rows} rows, {result.num_reread} read differently now; largest change of a reward "
        f"{result.max_reward_change:.3g}, of an advantage {result.max_advantage_change:.3g}\n{out}"
    )


@app.command()
def export(
    run: RunDir,
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write.")],
    role: Annotated[str, typer.Option(help="generator or verifier.")] = "generator",
    step: Annotated[int | None, typer.Option(help="Optimizer step of the checkpoint; default: the last.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, as PEFT does.")] = False,
) -> None:
    """Export a checkpoint as a Hugging Face folder.

    Example: `tango export runs/mine --role generator --out models/mine`
    """
    from tango_hpc.stages.convert import export_run

    typer.echo(export_run(run, role, out, step, adapter=adapter))


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Hugging Face folder, or hub id owner/name.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT adapter to add to the weights.")] = None,
) -> None:
    """Import a Hugging Face model as a folder for training, with checked weights, tokenizer and chat template.

    Example: `tango import Qwen/Qwen2.5-Math-7B --out models/Qwen2.5-Math-7B`
    """
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype {dtype!r}: choose bfloat16 or float32")
    from tango_hpc.stages.convert import import_model

    typer.echo(import_model(source, out, dtype, adapter))


@app.command()
def data(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set; `tango data list` names all of them.")],
    out: Annotated[Path | None, typer.Option(help="Parquet file to write.")] = None,
    source: Annotated[str | None, typer.Option(help="File, folder or hub id; default: the set's hub id.")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Split to read; default: the one used in the paper. last_letter: which questions, default train."
        ),
    ] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Prepared evaluation sets whose questions are dropped (repeatable).")
    ] = None,
    keep_overlap: Annotated[bool, typer.Option(help="Keep questions of evaluation sets.")] = False,
    max_question_characters: Annotated[
        int | None,
        typer.Option(help="Drop longer questions; default: 6000 for training splits, else no limit."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many rows.")] = None,
    kind: Annotated[str, typer.Option(help="last_letter: questions, generator_sft or verifier_sft.")] = "questions",
    rows: Annotated[int, typer.Option(min=1, help="last_letter: how many rows.")] = 20000,
    words: Annotated[str, typer.Option(help="last_letter: range of words.")] = "2-10",
    letters: Annotated[str, typer.Option(help="last_letter: range of letters in a word.")] = "3-10",
    slip: Annotated[float, typer.Option(min=0, max=1, help="last_letter: chance of a wrong step or judgement.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="last_letter: seed.")] = 0,
) -> None:
    """Prepare a data set: check its rows, drop duplicates and evaluation questions, write Parquet (docs/data.md).

    Example: `tango data math --source data/MATH --exclude data/eval --out data/math_train.parquet`
    """
    from tango_hpc.questions.data.prepare.readers import DATA_SETS

    if name == "list":
        for key, data_set in DATA_SETS.items():
            typer.echo(f"{key:16} {data_set.hub:42} {data_set.licence:12} {data_set.default_split}")
        typer.echo(f"{'last_letter':16} (made by seed)")
        return
    out = _check_data(context, name, out)
    if name == "last_letter":
        from tango_hpc.questions.tasks.last_letter_files import make_last_letter

        count = make_last_letter(
            out, kind=kind, split=split, rows=rows, words=words, letters=letters, slip=slip, seed=seed
        )
        typer.echo(f"last_letter ({kind}): {count:,} rows in {out}")
        return
    from tango_hpc.questions.data.prepare.pipeline import prepare

    report = prepare(
        name,
        source=source,
        out=out,
        split=split,
        exclude=exclude or [],
        keep_overlap=keep_overlap,
        max_question_characters=max_question_characters,
        limit=limit,
    )
    typer.echo("\n".join([*report.lines(), f"written to {out}"]))


def _check_data(context: typer.Context, name: str, out: Path | None) -> Path:
    """Return the file to write. Raises UserError for a missing or wrong one, and for options that the set has not."""
    if out is None:
        raise UserError(f"give the file to write: tango data {name} --out {name}.parquet")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name the file, {out / name}.parquet, say")
    of_files = {"source", "exclude", "keep_overlap", "max_question_characters", "limit"}
    of_made = {"kind", "rows", "words", "letters", "slip", "seed"}
    unused = of_files if name == "last_letter" else of_made
    if stray := [key for key in sorted(unused) if was_given(context, key)]:
        options = ", ".join("--" + key.replace("_", "-") for key in stray)
        raise UserError(f"{name} has no {options}; see tango data --help")
    return out


plan_commands.add_commands(app)
report_commands.add_commands(app)
manage_commands.add_commands(app)


def was_given(context: typer.Context, option: str) -> bool:
    """Return whether the user wrote this option, rather than that it has its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def explain_mistake(error: OSError) -> str | None:
    """Return a message for an error of a path or a permission; None for all other errors."""
    if error.errno == errno.ENAMETOOLONG:
        return f"this is no path, a name in it is too long: {error.filename}"
    if isinstance(error, IsADirectoryError):
        return f"{error.filename} is a folder; name a file"
    if isinstance(error, NotADirectoryError):
        return f"{error.filename}: a part of this path is a file, and no folder; give another place"
    if isinstance(error, FileExistsError) and error.filename and not os.path.isdir(error.filename):
        return f"{error.filename} is there already, and is no folder; give another place"
    if not isinstance(error, PermissionError):
        return None
    if error.filename is None:
        return "not allowed: this belongs to another user, who alone can do that"
    path = Path(error.filename)
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    return f"you may not do this to {path}: {there} belongs to {owner_of(there)}"


def owner_of(path: Path) -> str:
    """Return the name of the user whose file it is, or the number where it has none."""
    uid = path.lstat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (UserError, StoppedEarly) as error:
        print(f"tango: {visible(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        mistake = explain_mistake(error)
        if mistake is not None:
            print(f"tango: {visible(mistake)}", file=sys.stderr)
            sys.exit(UserError.exit_code)
        if not is_of_disk(error):
            raise
        print(f"tango: {explain_disk(error)}", file=sys.stderr)
        sys.exit(CheckFailed.exit_code)


if __name__ == "__main__":
    main()
