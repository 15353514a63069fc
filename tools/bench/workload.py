"""What is measured on: small models of random weights, and the configuration of runs that train them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import read_metrics

# 2.8M parameters: what the goals against TRL name.
SMALL = TinyModelConfig(
    family="qwen2", hidden_size=256, intermediate_size=640, num_layers=4, num_heads=8, num_kv_heads=4
)
# The quick start's, 1.3M.
QUICKSTART = TinyModelConfig(
    family="qwen2", hidden_size=192, intermediate_size=384, num_layers=4, num_heads=6, num_kv_heads=2
)
GROUP_SIZE = 5


def make_model(folder: Path, sizes: TinyModelConfig) -> Path:
    """A Hugging Face folder of random weights with the tokenizer of letters and tags."""
    from tango_hpc.questions.tasks.tiny import build_tiny_model

    if not folder.exists():
        build_tiny_model(folder, sizes, seed=0)
    return folder


def run_config(
    folder: Path, model: Path, *, verifier: bool, steps: int, questions: int = 32, max_tokens: int = 128,
    ranks: int = 2, **train: Any,
) -> Path:  # fmt: skip
    """A configuration of `steps` generator steps on last-letter questions, with or without a verifier; the file."""
    role: dict[str, Any] = {
        "model": {"path": str(model)},
        "optimizer": {"learning_rate": 1e-6},
        "rollout": {"max_num_seqs": 256, "max_batched_tokens": 4096, "kv_cache_gb": 0.5},
        "max_prompt_tokens": 80,
        "max_response_tokens": max_tokens,
        "micro_batch_tokens": 16384,
    }
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "task": {
            "name": "last_letter",
            "last_letter": {
                "train_words": [1, 4], "train_letters": [2, 4], "eval_words": [1, 4], "eval_letters": [2, 4],
                "train_questions": 2048, "eval_questions": 8,
            },
        },
        "data": {
            "train": str(folder / "train.parquet"), "eval": str(folder / "eval.parquet"), "eval_questions": 8,
        },
        "generator": role,
        "algorithm": {"kl_coef": 0.0},
        "train": {
            "verifier_warmup_steps": 0, "verifier_steps_per_cycle": 0, "generator_steps": steps,
            "questions_per_step": questions, "rollouts_per_question": GROUP_SIZE, "eval_every": 0, "dump_every": 0,
        }
        | train,
        "checkpoint": {"every_steps": 0},
        "launch": {"tasks_per_node": ranks, "device": "cpu", "dtype": "float32", "threads_per_rank": 1},
    }  # fmt: skip
    if verifier:
        config["verifier"] = role | {"max_prompt_tokens": 80 + max_tokens}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def run_training(config: Path) -> list[dict[str, Any]]:
    """`tango train` of that file in processes of its own; the rows of its metrics."""
    words = [sys.executable, "-P", "-m", "tango_hpc.commands.cli", "train", str(config)]
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise RuntimeError(f"a run of the benchmark ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return read_metrics(RunDirectory(read_config(config).run.dir), "train")


def read_config(path: Path) -> Config:
    """The configuration of a file made here."""
    return load_config(path)


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Settings of a measurement, for its ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))


def read_settings(folder: Path) -> dict[str, Any]:
    """What `write_settings` wrote."""
    settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    return settings
