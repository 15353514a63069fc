"""`tango doctor CONFIG --rates`: small runs of the whole loop on this CPU, which give `tango plan` its rates.

Three runs with untrained models: a tiny one with few and with many responses, which tells what does not depend on the
model, and one of 20 million parameters, which tells what share of the peak is reached.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.errors import UserError
from tango_hpc.base.formats import say
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import PHASES, read_metrics
from tango_hpc.plan.cards import Machine
from tango_hpc.plan.lengths import measured_load
from tango_hpc.plan.rates import Observed, fitted, keep, machine_of_cpu

TINY = TinyModelConfig(hidden_size=128, intermediate_size=256, num_heads=4, num_layers=4)
LARGER = TinyModelConfig(hidden_size=512, intermediate_size=1536, num_heads=8, num_layers=6)
# Model, questions of a step for each rank, rollouts of a question.
RUNS = ((TINY, 2, 4), (TINY, 16, 4), (LARGER, 4, 4))
STEPS = 3  # of the generator; of each role the first is not counted


def measure_rates(config_file: Path | None, overrides: Sequence[str], console: Console) -> None:
    """Measure, keep the rates in the user's cache, and say what they are. Raises UserError for a launch on GPUs."""
    config = load_config(config_file, overrides) if config_file is not None else None
    if config is None or config.launch.device != "cpu" or config.launch.nodes != 1:
        raise UserError("--rates measures this machine's CPU: give a CONFIG with launch.device cpu on one node")
    measured = []
    with tempfile.TemporaryDirectory(prefix="tango_rates_") as folder:
        for number, run in enumerate(RUNS):
            say(console, f"small run {number + 1} of {len(RUNS)} ...")
            measured.append(_run(config, Path(folder) / str(number), *run))
        machine = _peaks(config)
        start = median(seconds for _, seconds in measured)
        rates = fitted([step for steps, _ in measured for step in steps], machine, start)
    file = keep(replace(machine, rates=rates), config)
    launch = config.launch
    lines = (
        f"{machine.name}: a rank of {launch.threads_per_rank} thread(s) has {machine.operations / 1e9:,.0f} GFLOP/s in"
        f" {launch.dtype} and {machine.bandwidth / 1e9:.1f} GB/s.",
        f"Training reaches {rates.training:.0%} of that, writing {rates.decoding:.0%}; a token step takes"
        f" {1000 * rates.decode_step:.1f} ms beside that, and {1000 * rates.decode_sequence:.2f} ms a sequence.",
        f"Kept in {file}; `tango plan` says seconds for such launches.",
    )
    say(console, "\n".join(lines))


def _run(config: Config, folder: Path, model: TinyModelConfig, questions: int, rollouts: int) -> tuple[list, float]:
    """Return the steps of a run as observations, and the seconds from its start to its first step."""
    from transformers.utils import logging

    from tango_hpc.questions.tasks.tiny import build_tiny_model

    logging.disable_progress_bar()
    folder.mkdir()
    for seed, role in enumerate(("generator", "verifier")):
        build_tiny_model(folder / role, model, seed)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(small_run(config, folder, questions * config.world_size, rollouts)))
    begun = time.time()
    command = [sys.executable, "-P", "-m", "tango_hpc.commands.cli", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"a small run failed here, so no rates were measured:\n{done.stderr[-2000:]}")
    own, rows = load_config(file), read_metrics(RunDirectory(folder / "run"), "train")
    start = rows[0]["time"] - rows[0]["seconds/total"] - begun
    found = []
    for role in ("generator", "verifier"):
        counted = [row for row in rows if row["role"] == role][1:]
        seconds = {phase: median(row[f"seconds/{phase}"] or 0.0 for row in counted) for phase in (*PHASES, "score")}
        found.append(Observed(own, measured_load(own, rows), role, seconds))
    return found, start


def small_run(config: Config, folder: Path, questions: int, rollouts: int, steps: int = STEPS) -> dict[str, Any]:
    """Return the configuration of a small run that is launched as `config`, with models in FOLDER/generator and
    FOLDER/verifier.
    """
    role = {
        "rollout": {"max_num_seqs": 256, "max_batched_tokens": 4096, "kv_cache_gb": 0.25},
        "optimizer": {"learning_rate": 1e-6},
        "max_response_tokens": 64,
        "micro_batch_tokens": 4096,
    }
    launch = config.launch
    return {
        "run": {"dir": str(folder / "run"), "trackers": []},
        "task": {"name": "last_letter", "last_letter": {"train_questions": 512, "eval_questions": 8}},
        "data": {"train": "${run.dir}/train.parquet", "eval": "${run.dir}/eval.parquet", "eval_questions": 4},
        "generator": {**role, "model": {"path": str(folder / "generator")}, "max_prompt_tokens": 100},
        "verifier": {**role, "model": {"path": str(folder / "verifier")}, "max_prompt_tokens": 240},
        "train": {
            "verifier_warmup_steps": 0, "generator_steps": steps, "generator_steps_per_cycle": 1,
            "questions_per_step": questions, "rollouts_per_question": rollouts, "eval_every": 0, "dump_every": 0,
        },
        "algorithm": {"kl_coef": 0.0, "entropy_coef": 1e-3},
        "checkpoint": {"every_steps": 0},
        "launch": {
            "nodes": 1, "tasks_per_node": launch.tasks_per_node, "device": "cpu", "dtype": launch.dtype,
            "threads_per_rank": launch.threads_per_rank,
        },
    }  # fmt: skip


def _peaks(config: Config) -> Machine:
    """Return the machine by what one rank reaches: a large matrix product, and copies of memory."""
    import torch

    from tango_hpc.models.trainer.flops import measured_peak

    torch.set_num_threads(config.launch.threads_per_rank or 1)
    dtype = getattr(torch, config.launch.dtype)
    operations = measured_peak(dtype, torch.device("cpu"))
    source = torch.ones(32 * 2**20)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - begun))
    return machine_of_cpu(operations, best)
