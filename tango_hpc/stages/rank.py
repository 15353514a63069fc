"""The program that every task runs: `python -m tango_hpc.stages.rank RUN_DIR STAGE`.

The launcher has written RUN_DIR/config.yaml and set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; in an
srun step they come from Slurm. A task starts one process for each role of the stage on each of its ranks
(runner/workers.py), and all processes of a role form a world of their own.
Exit codes: 0 done, 78 the input or a check is wrong (never retried), 75 a machine of the job keeps it from starting, 85
saved and resumable, 1 otherwise; under a supervisor these stand in the outcomes of the processes.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import CheckFailed, NodeFailed, UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.plan.host import memory_of_this_job
from tango_hpc.plan.memory import saves_in_background
from tango_hpc.runner import slurm
from tango_hpc.runner.affinity import stay_near_gpu
from tango_hpc.runner.environment import rank_variables, threads_of_rank
from tango_hpc.runner.gpu_driver import why_no_gpu, why_not_shared
from tango_hpc.runner.gpu_environment import prepare_gpu_environment
from tango_hpc.runner.guard import SUPERVISED
from tango_hpc.runner.process import RankProcess
from tango_hpc.runner.snapshot import check_runs_code_of_attempt
from tango_hpc.runner.staging import staged_overrides
from tango_hpc.runner.workers import LOADING, Body, host_ranks
from tango_hpc.stages.stage import STAGES, SavesSteps, Stage

if TYPE_CHECKING:
    from tango_hpc.models.parallel.exchange import Exchange

# A role waits for the other as long as that one advances; the watchdog ends a run that hangs.
LONGEST_PHASE_SECONDS = 30 * 86_400.0
OPEN_FILES = 65_536
STARTED_BEFORE_FORK = (
    "CUDA was started in the process that this one was forked from, so this one cannot use a GPU. tango_hpc does not do"
    " that: look for a sitecustomize or .pth file of this Python that uses torch.cuda, or report a bug"
)


def prepare_stage(directory: RunDirectory, stage: str) -> tuple[Sequence[str], Body]:
    """Return the roles of `stage` and what their processes do.

    On CPUs this imports the stage, once for all processes. On GPUs each process imports the stage after the fork: some
    packages start CUDA while they are imported, and CUDA does not work in processes that are forked afterwards.
    """
    if SUPERVISED in os.environ:
        check_runs_code_of_attempt(directory)
    config = load_config(directory.config, staged_overrides(directory.config))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what a job needs was on the shared disk before it started
    chosen = STAGES[stage]
    roles = chosen.roles(config)
    if config.launch.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        chosen.load("cpu")
    else:
        for line in prepare_gpu_environment():
            print(line, flush=True)
    return roles, lambda worker, process: run_stage(directory, config, chosen, roles, worker, process)


def run_stage(
    directory: RunDirectory, config: Config, stage: Stage, roles: Sequence[str], worker: Worker, process: RankProcess
) -> None:
    """Join the other processes and run the stage to its end; a user's mistake found here becomes `CheckFailed`."""
    os.environ.update(rank_variables(worker.rank))
    num_threads = threads_of_rank(config.launch)  # while this process still has all its CPUs
    if config.launch.device == "cuda":
        stay_near_gpu(int(os.environ["LOCAL_RANK"]), num_threads)  # first of all: imports start threads and take memory
    process.heart.enter(LOADING)

    import torch
    from torch.distributed import PrefixStore

    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.parallel.ranks import init_distributed, is_busy, open_store, shutdown_distributed

    launch = config.launch
    if launch.device == "cuda" and torch.cuda._is_in_bad_fork():
        raise CheckFailed(STARTED_BEFORE_FORK)
    if launch.device == "cuda" and not torch.cuda.is_available():
        raise NodeFailed(f"launch.device is cuda, but this rank has no GPU: {why_no_gpu()}")
    if launch.device == "cuda" and os.environ["LOCAL_RANK"] == "0" and worker.role == roles[0]:
        refused = why_not_shared(len(roles))
        if refused is not None:
            raise CheckFailed(": ".join(refused))
    torch.set_num_threads(num_threads)
    try:
        function = stage.load(launch.device)
        process.heart.enter("meeting the other ranks")
        store = open_store(launch.collective_timeout_seconds, hosts=worker == (0, roles[0]))
        device = init_distributed(launch.collective_timeout_seconds, PrefixStore(worker.role, store)).device
        if device.type == "cuda":
            process.watch_stream = lambda: partial(is_busy, torch.cuda.current_stream(device))
        exchange = Exchange.join(store, roles, worker.role, LONGEST_PHASE_SECONDS)
        process.stop.agree = exchange.any
        if isinstance(stage, SavesSteps):
            config = decided(config, exchange)
        function(config, directory, process, exchange)
    except (CheckFailed, NodeFailed):
        raise
    except UserError as error:
        raise CheckFailed(str(error)) from error
    exchange.barrier()
    shutdown_distributed()


def decided(config: Config, exchange: Exchange) -> Config:
    """Return `config` with the `checkpoint.background` that holds on all nodes. Collective over all processes."""
    everywhere = not exchange.any(not saves_in_background(config, memory_of_this_job()))
    checkpoint = config.checkpoint.model_copy(update={"background": everywhere})
    return config.model_copy(update={"checkpoint": checkpoint})


def _allow_open_files() -> None:
    """Raise the usual limit of 1024 as far as we may: each group of all ranks takes a socket for each of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> int:
    """Run the program; the exit codes are in the module's docstring."""
    path, stage = sys.argv[1:]
    _allow_open_files()
    directory = RunDirectory.open(path)
    try:
        return host_ranks(directory, lambda: prepare_stage(directory, stage))
    except UserError as error:  # another process has the run
        print(f"tango: {error}", file=sys.stderr, flush=True)
        slurm.end_this_step()  # the other tasks would wait in vain, and then write into that run
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
