"""Arguments of several commands of `tango`: a config, what lies over it, a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; shipped ones are in configs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE.yaml|KEY.PATH=VALUE", help="More config files and settings, later over earlier."),
]
ProfileName = Annotated[
    str | None, typer.Option("--profile", help="Cluster profile: a name in slurm/profiles or your own, or a YAML file.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run that run.dir holds.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
RunOrFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a folder of them.")]
