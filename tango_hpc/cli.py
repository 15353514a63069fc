"""The `tango` command. Each command imports what it needs when it runs, so that `--help` is instant.

Exit codes: 0 done, 2 bad input, 1 failure, 85 stopped and resumable, 78 a check failed in a running job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tango_hpc.errors import StoppedEarly, UserError

app = typer.Typer(
    name="tango",
    help="Train a reasoning model against a verifier that learns with it (RL Tango), on Slurm or on a laptop.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; shipped ones are in configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace those of CONFIG.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run that run.dir holds.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]


def _run_here(stage: str, config: Path, overrides: list[str] | None, resume: bool) -> None:
    from tango_hpc.launch.local import run_foreground

    raise typer.Exit(run_foreground(stage, config, overrides or [], resume=resume))


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Fine-tune the roles that the config's `sft` section names.

    Example: `tango sft configs/quickstart.yaml seed=1`
    """
    _run_here("sft", config, overrides, resume)


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train generator and verifier by Algorithm 1.

    Example: `tango train configs/quickstart.yaml run.dir=runs/mine train.generator_steps=50`
    """
    _run_here("train", config, overrides, resume)


def main() -> None:
    """Console entry point."""
    try:
        app()
    except (UserError, StoppedEarly) as error:
        print(f"tango: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
