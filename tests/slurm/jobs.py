"""Runs of counting ranks as Slurm jobs, and what tests ask of them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tango_hpc.base.config import Config
from tango_hpc.base.config.load import validate_tree
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.status import RunState, states
from tango_hpc.commands.submit import submit
from tango_hpc.questions.data.tables import write_rows
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog, known_jobs, submitted_jobs
from tango_hpc.runner.heartbeat import is_loading
from tests.helpers.counter_rank import RANK_COMMAND
from tests.helpers.small_tokenizer import write_tokenizer

PROFILE = Profile(time="10", env={"TANGO_RANK_COMMAND": shlex.join(RANK_COMMAND)})
ROOT = Path(__file__).parents[2]
TANGO = (sys.executable, "-P", "-m", "tango_hpc.commands.cli")


def counting_config(folder: Path, name: str, launch: dict[str, Any] | None = None, **behaviour: Any) -> Config:
    """A config whose files are there, in `folder`; its run counts in FOLDER/NAME."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").touch()
    write_tokenizer(model)
    dimensions = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    limits = {"max_position_embeddings": 128, "num_key_value_heads": 2, "vocab_size": 32, "eos_token_id": 0}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", **dimensions, **limits}))
    questions = folder / "questions.parquet"
    if not questions.exists():
        write_rows(questions, [{"id": "1", "question": "a?", "answer": "a", "source": "test"}])
    tree = {
        "run": {"dir": str(folder / name)},
        "task": {"name": "last_letter"},
        "data": {"train": str(questions), "eval": str(questions)},
        "generator": {
            "model": {"path": str(model)}, "max_prompt_tokens": 64, "max_response_tokens": 64,
            "rollout": {"kv_cache_gb": 0.1},
        },
        "train": {"verifier_warmup_steps": 0, "verifier_steps_per_cycle": 0, "questions_per_step": 4},
        "launch": {
            "device": "cpu", "dtype": "float32", "nodes": 2, "tasks_per_node": 1, "grace_seconds": 20,
            **(launch or {}),
        },
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    (folder / f"{name}.behaviour.json").write_text(json.dumps({"steps": 5, "step_seconds": 0.1} | behaviour))
    return validate_tree(tree, "test")


class CountingJob:
    """A submitted run of counting ranks."""

    def __init__(self, folder: Path, name: str, launch: dict[str, Any] | None = None, **behaviour: Any) -> None:
        self.config = counting_config(folder, name, launch, **behaviour)
        self.directory = RunDirectory(self.config.run.dir)

    def behave(self, **behaviour: Any) -> None:
        """Changes what its ranks do from their next start on."""
        file = self.directory.path.with_name(f"{self.directory.path.name}.behaviour.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | behaviour))

    def end_soon(self) -> int:
        """Has the next start do two steps more than were done so far, and end; the number of the last one."""
        steps = max(self.steps_logged(), default=0) + 2
        self.behave(steps=steps)
        return steps

    def supervisor_log(self) -> str:
        """What its batch process has printed, over all attempts of its last job."""
        return Path(submitted_jobs(self.directory)[-1]["log"]).read_text()

    def submit(self, profile: str | Profile = PROFILE) -> CountingJob:
        """Puts it into the queue."""
        self.job = submit("train", self.config, profile=profile)
        self.job_id: str = self.job.job_id
        return self

    def state(self) -> RunState:
        """What `tango status` says."""
        return states([self.directory])[0]

    def attempts(self) -> list[Attempt]:
        """What was tried so far."""
        return AttemptLog(self.directory).read()

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has done `step` and its heartbeat has told of a safe point: from then on a stop saves."""
        log = self.directory.log_file(Worker(0, "generator"))

        def done() -> bool:
            assert self.state().state != "failed", self.explain()
            return log.exists() and f"rank 0 step {step}\n" in log.read_text() and not is_loading(self.directory)

        wait_until(done, self.explain)

    def wait_for_attempts(self, count: int) -> list[Attempt]:
        """Until so many attempts have ended."""
        wait_until(lambda: sum(attempt.ended is not None for attempt in self.attempts()) >= count, self.explain)
        return self.attempts()

    def wait_for_end(self) -> RunState:
        """Until nothing more happens by itself; a job that waits for its two minutes after a requeue starts at once."""

        def over() -> bool:
            start_requeued(self.job_id)
            return self.state().is_over and not self.is_in_queue()

        wait_until(over, self.explain)
        return self.state()

    def is_in_queue(self) -> bool:
        """Whether Slurm still has it, or a later job of its run."""
        found = map(slurm.show_job, {self.job_id, *known_jobs(self.directory)})
        return any(job is not None and job.is_alive for job in found)

    def steps_logged(self, rank: int = 0) -> list[int]:
        """The steps that `rank` did, over all attempts, in order."""
        lines = self.directory.log_file(Worker(rank, "generator")).read_text().splitlines()
        return [int(line.split()[-1]) for line in lines if line.startswith(f"rank {rank} step")]

    def explain(self) -> str:
        """All that is known, for a test that waits in vain; the cause comes last, where records of long output
        keep it.
        """
        shown = [slurm.run_command("squeue", check=False)]
        for file in sorted(self.directory.logs.rglob("*")):
            if file.is_file() and file.suffix in (".log", ".out"):
                shown.append(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}")
        return "\n".join([*shown, *map(repr, self.attempts()), repr(self.state())])


def processes_of(job: str) -> list[str]:
    """Command lines of the processes that belong to a job, told by their environment; of an array, to any of
    its tasks.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if {f"SLURM_JOB_ID={job}".encode(), f"SLURM_ARRAY_JOB_ID={job}".encode()} & set(variables):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or it is another user's
    return [words for words in found if words]  # a zombie has none


def start_requeued(*jobs: str) -> None:
    """Slurm holds a requeued job back for two minutes; a test does not wait for that."""
    found = [slurm.show_job(job) for job in jobs]
    held = [job.job_id for job in found if job is not None and (job.state, job.reason) == ("PENDING", "BeginTime")]
    if held:
        time.sleep(2)  # in the second of the requeue it would fail with "job credential revoked"
    for job in held:
        slurm.run_command("scontrol", "update", f"jobid={job}", "starttime=now", check=False)


def start_now(job: str) -> None:
    """Waits until a job that was told to go is in the queue again, and spares it the two minutes."""
    held = ("PENDING", "BeginTime")
    wait_until(lambda: (found := slurm.show_job(job)) is not None and (found.state, found.reason) == held)
    start_requeued(job)


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = str, timeout: float = 240) -> None:
    """Returns when `condition` holds; fails with `explain()` if it does not within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.2)


def tango(*words: str, check: bool = True, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the `tango` command; `env` is added to the environment."""
    both = os.environ | (env or {})
    done = subprocess.run([*TANGO, *words], capture_output=True, text=True, timeout=240, check=False, env=both)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def tango_command(folder: Path) -> Path:
    """A program `tango` in `folder`, for a batch script to find on its PATH."""
    command = folder / "tango"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(TANGO)} "$@"\n')
    command.chmod(0o755)
    return command
