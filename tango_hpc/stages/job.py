"""The programs of a job: `python -m tango_hpc.stages.job RUN_DIR STAGES` in a batch script, `run_job` through
submitit.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tango_hpc.base.errors import CheckFailed, UserError
from tango_hpc.base.files import explain_disk, is_of_disk
from tango_hpc.base.formats import visible
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_summary
from tango_hpc.runner import slurm
from tango_hpc.runner.job import exit_code_of_job, run_programs
from tango_hpc.runner.outcome import STOPPED
from tango_hpc.stages.stage import stages_named


def run_job(run_dir: str, stages: str, snapshot: str | None = None) -> dict[str, Any]:
    """Run the stages of a submitted job (submitit pickles the arguments, nothing else); return the run's summary.

    A run that saved and stopped returns its summary too, unless `launch.stopped_exit_code` asks for another exit code.
    Raises RuntimeError where the run failed.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's handler would requeue, or fail, before and after the run
    directory = RunDirectory.open(run_dir)
    console = Console(soft_wrap=True)
    code = run_programs(directory, stages_named(stages), console, Path(snapshot) if snapshot else None)
    if code == STOPPED and slurm.is_batch_process() and (ending := exit_code_of_job(directory, code)) != 0:
        sys.exit(ending)
    if code not in (0, STOPPED):
        raise RuntimeError(f"{stages} in {run_dir} failed with exit code {code}; see `tango logs {run_dir}`")
    return read_summary(directory)


def main() -> int:
    """Run the stages that the command line names and return the exit code."""
    path, stages = sys.argv[1:]
    try:
        directory = RunDirectory.open(path)
        code = run_programs(directory, stages_named(stages), Console(soft_wrap=True), directory.snapshot)
        return exit_code_of_job(directory, code)
    except UserError as error:
        print(f"tango: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if not is_of_disk(error):
            raise
        print(f"tango: {explain_disk(error)}", file=sys.stderr)
        return CheckFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
