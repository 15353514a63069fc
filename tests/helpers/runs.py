"""A whole Tango run that takes seconds: two ranks, both roles, everything real but small."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config, config_to_yaml, load_config
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.questions.tasks.made_files import make_missing_files
from tango_hpc.questions.tasks.tiny import build_tiny_model
from tango_hpc.runner.enter import enter_run

ROOT = Path(__file__).parents[2]
OF_THE_MACHINE = ("seconds/", "speed/", "memory/")  # keys of metrics: what it took, not what was computed

SMALL = (
    "sft.generator.steps=4",
    "sft.verifier.steps=4",
    "sft.generator.batch_size=8",
    "sft.verifier.batch_size=8",
    "sft.generator.eval_rows=8",
    "sft.verifier.eval_rows=8",
    "task.last_letter.sft_rows=64",
    "task.last_letter.train_questions=64",
    "task.last_letter.eval_questions=8",
    "data.eval_questions=8",
    "sft.generator.init.build.hidden_size=64",
    "sft.generator.init.build.intermediate_size=96",
    "sft.generator.init.build.num_heads=2",
    "sft.generator.init.build.num_layers=2",
    "generator.parallel.tensor=2",
    "generator.max_response_tokens=24",
    "verifier.max_prompt_tokens=120",
    "verifier.max_response_tokens=24",
    "train.questions_per_step=4",
    "train.rollouts_per_question=2",
    "train.verifier_warmup_steps=1",
    "train.generator_steps=4",
    "train.eval_every=2",
    "train.dump_every=1",
    "checkpoint.every_steps=0",
    "generator.rollout.kv_cache_gb=0.1",
    "generator.rollout.max_num_seqs=16",
    "verifier.rollout.kv_cache_gb=0.1",
    "verifier.rollout.max_num_seqs=16",
)

# For the quick start, after SMALL: one model takes both roles.
ONE_MODEL = (
    'sft.verifier={same_as: generator, data: "${run.dir}/data/sft_verifier.parquet"}',
    "verifier={same_as: generator, max_prompt_tokens: 120, max_response_tokens: 24}",
)


def small_config(run_dir: Path, *overrides: str) -> Config:
    """The quick start, cut down; `overrides` come last."""
    return load_config(ROOT / "configs/quickstart.yaml", [f"run.dir={run_dir}", *SMALL, *overrides])


def prepare_small_run(run_dir: Path, *overrides: str) -> tuple[Config, RunDirectory]:
    """A run directory with data and untrained models, ready for its `train` stage."""
    config = small_config(run_dir, *overrides)
    directory, _ = enter_run(run_dir, config_to_yaml(config), resume=False, stage="train")
    make_missing_files(config)
    sizes = config.sft.generator.init.build if config.sft.generator else None
    assert sizes is not None
    for seed, model in enumerate(config.models.values()):
        build_tiny_model(model.model.path, sizes, seed=seed)
    return config, directory


def computed(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of metrics says of the training itself."""
    return {key: value for key, value in row.items() if not key.startswith(OF_THE_MACHINE) and key != "time"}


class Unseen:
    """A display that shows nothing."""

    def refresh(self) -> None: ...

    def finish(self) -> None: ...


def unseen() -> AbstractContextManager[Unseen]:
    """Return the display of a run that nobody watches."""
    return nullcontext(Unseen())
