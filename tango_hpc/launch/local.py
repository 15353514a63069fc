"""The foreground commands: a stage with its ranks on this machine, or over the allocation that it was called in."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tango_hpc.config import Config, config_to_yaml, load_config
from tango_hpc.errors import StoppedEarly
from tango_hpc.launch.starters import LocalStarter
from tango_hpc.launch.supervisor import Supervisor
from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.summary import read_summary
from tango_hpc.stages.preflight import check_inputs, synthesise_data


def run_foreground(stage: str, config_file: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Runs `stage` to its end and returns the exit code: 0 done, 85 saved, 78 or 2 wrong input, 1 failed."""
    config = load_config(config_file, overrides)
    check_inputs(config, stage)
    directory, changes = RunDirectory.create(config.run.dir, config_to_yaml(config), resume=resume, stage=stage)
    console = Console()
    if not changes and is_done(directory, stage):
        say(console, f"{stage} in {directory.path} is done already.")
        return 0
    directory.stop_file.unlink(missing_ok=True)
    synthesise_data(config)
    code = supervise_local(directory, stage, config, console)
    if code == StoppedEarly.exit_code:
        say(console, f"Saved. Continue with: {resume_command()}")
    elif code != 0:
        say(console, f"Logs of the ranks: {directory.logs}")
    return code


def supervise_local(directory: RunDirectory, stage: str, config: Config, console: Console) -> int:
    """One attempt with local ranks."""
    return Supervisor(directory, config, LocalStarter(directory, stage, config), console).run()


def is_done(directory: RunDirectory, stage: str) -> bool:
    """Whether `stage` has run to its end there."""
    return read_summary(directory).get("stages", {}).get(stage, {}).get("status") == "done"


def resume_command() -> str:
    """This very command, continued."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return shlex.join(words if "--resume" in words else [*words, "--resume"])


def say(console: Console, message: str) -> None:
    """Prints `message` as it is: no markup, no colours, no line breaks that would spoil copying."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)
