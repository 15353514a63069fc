"""When CUDA starts in a task: in its processes, never in the task itself, which forks them.

Every look is a process of its own and a task: it runs `tango_hpc.stages.rank` to the end. `torch.cuda.device_count`
answers 1 in the task, as with a GPU, and 0 in what the task forks, which therefore ends early.

    python fork_checks.py RUN STAGE STARTS.json [--imports-first]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch
from checks import SECONDS, Check, MovedError, Results, check, expect, perform

from tango_hpc.base.config import config_to_yaml, load_config
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.environment import free_port
from tango_hpc.runner.outcome import read_outcomes
from tango_hpc.stages import rank
from tango_hpc.stages.stage import STAGES

CONFIG = Path(__file__).parents[2] / "configs/quickstart_gpu.yaml"
TORCH = Path(torch.__file__).parent
IMPORTS_FIRST = "--imports-first"
# Either would keep flashinfer from asking the GPUs.
NOT_IN_A_LOOK = ("CUDA_VISIBLE_DEVICES", "FLASHINFER_CUDA_ARCH_LIST")

IMPORT_EVERYTHING = ("sft", "train")  # without vLLM and with it

CHECKS: list[Check] = []
fork_check = partial(check, to=CHECKS)


def run() -> Results:
    """All of them."""
    return perform(CHECKS)


@fork_check("CUDA starts after the fork", used="stages/rank.py: prepare_stage", cuda_build=True)
def fork_first() -> None:
    """No stage starts CUDA in the task. With the imports in front of the fork two do, and their processes say so."""
    for stage in STAGES:
        starts, errors = look(stage)
        expect(starts, [], f"lines that start CUDA in the task of {stage}")
        expect([error for error in errors if rank.STARTED_BEFORE_FORK in error], [], f"errors of {stage}'s processes")
    for stage in IMPORT_EVERYTHING:
        starts, errors = look(stage, IMPORTS_FIRST)
        if not starts:
            raise MovedError(f"importing {stage} starts no CUDA with these packages, so this check cannot fail")
        for error in errors:
            expect(error, f"CheckFailed: {rank.STARTED_BEFORE_FORK}", f"error of {stage}'s processes, imports first")


def look(stage: str, *options: str) -> tuple[list[str], list[str]]:
    """The lines that start CUDA in a task of `stage`, and the errors of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(CONFIG, [f"run.dir={folder}/run", "launch.tasks_per_node=1"])
        directory, _ = enter_run(config.run.dir, config_to_yaml(config), resume=False, stage=stage)
        env = {name: value for name, value in os.environ.items() if name not in NOT_IN_A_LOOK}
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        starts = Path(folder, "starts.json")
        words = [sys.executable, __file__, str(directory.path), stage, str(starts), *options]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        outcomes = read_outcomes(directory)
        if not starts.exists() or not outcomes:
            raise AssertionError(f"a task of {stage} ended with code {done.returncode}: {done.stderr[-400:]}")
        return json.loads(starts.read_text()), [outcome.error for outcome in outcomes.values()]


def be_task(run: str, stage: str, file: str, *options: str) -> None:
    """Be a task that notes where CUDA starts in it; the notes of its processes are lost with them."""
    task, start, starts = os.getpid(), torch.cuda._lazy_init, []

    def noted() -> None:
        callers = traceback.extract_stack()[:-1]
        place = next(frame for frame in reversed(callers) if not Path(frame.filename).is_relative_to(TORCH))
        starts.append(f"{place.filename}:{place.lineno}")
        start()

    torch.cuda._lazy_init = noted
    torch.cuda.device_count = lambda: int(os.getpid() == task)
    if IMPORTS_FIRST in options:
        STAGES[stage].load("cuda")
    sys.argv[1:] = [run, stage]
    rank.main()
    Path(file).write_text(json.dumps(starts))


if __name__ == "__main__":
    be_task(*sys.argv[1:])
