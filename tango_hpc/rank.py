"""The program that every rank runs: `python -m tango_hpc.rank RUN_DIR STAGE`.

The launcher has written RUN_DIR/config.yaml and set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT; in an srun step they come from Slurm.
Exit codes: 0 done, 78 the input or a check is wrong (never retried), 85 saved and resumable, 1 otherwise; under a
supervisor these stand in the rank's outcome (control/guard.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from tango_hpc.config import Config, load_config
from tango_hpc.control.guard import run_guarded
from tango_hpc.control.stop import StopSignal
from tango_hpc.errors import CheckFailed, UserError
from tango_hpc.launch.environment import own_rank, prepare_rank
from tango_hpc.launch.gpu_driver import why_no_gpu
from tango_hpc.launch.staging import staged_overrides
from tango_hpc.run.directory import RunDirectory

# Each is called with (config, directory, stop), and imported when it is the one to run.
STAGES = {
    "sft": "tango_hpc.stages.sft:fine_tune",
    "train": "tango_hpc.stages.tango:train",
    "eval": "tango_hpc.stages.benchmark:evaluate",
    "teacher": "tango_hpc.stages.teacher:teach",
}


def run_stage(directory: RunDirectory, stage: str, stop: StopSignal) -> None:
    """Join the other ranks and run `stage` to its end; a user's mistake found here becomes `CheckFailed`."""
    stop.enter("meeting the other ranks")
    try:
        os.environ.update(prepare_rank(directory))
    except UserError as error:
        raise CheckFailed(str(error)) from error
    config = load_config(directory.config, staged_overrides(directory.config))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what a job needs was on the shared disk before it started
    if config.launch.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    stop.enter("loading libraries")

    import torch

    if config.launch.device == "cuda" and not torch.cuda.is_available():
        raise CheckFailed(f"launch.device is cuda, but this rank has no GPU: {why_no_gpu()}")

    torch.set_num_threads(config.launch.threads_per_rank)
    from tango_hpc.parallel.ranks import init_distributed, shutdown_distributed

    module, _, name = STAGES[stage].partition(":")
    body: Callable[[Config, RunDirectory, StopSignal], None] = getattr(import_module(module), name)
    stop.enter("meeting the other ranks")
    init_distributed(config.launch.collective_timeout_seconds)
    try:
        body(config, directory, stop)
    except CheckFailed:
        raise
    except UserError as error:
        raise CheckFailed(str(error)) from error
    shutdown_distributed()


def main() -> int:
    """Entry point; the exit code is in the module's docstring."""
    path, stage = sys.argv[1:]
    directory = RunDirectory.open(path)
    return run_guarded(directory, own_rank(), lambda stop: run_stage(directory, stage, stop))


if __name__ == "__main__":
    sys.exit(main())
