"""The layers of the paper's experiments, by short names: 1x4/llama_rloo_vanilla is a size, a pair of models, a method."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from tango_hpc.base.config import Config, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"4x8": (), "1x8": ("machines/1x8.yaml",), "1x4": ("machines/1x4.yaml",)}
FAMILIES = {"qwen": (), "llama": ("paper/llama.yaml",)}
ALGORITHMS = {"grpo": (), "rloo": ("methods/rloo.yaml",), "reinforce_pp": ("methods/reinforce_pp.yaml",)}
KINDS = {"tango": (), "vanilla": ("methods/alone.yaml",)}

LAYERS: dict[str, tuple[str, ...]] = {
    f"{size}/{family}_{algorithm}_{kind}": (
        "paper/qwen.yaml", *FAMILIES[family], *SIZES[size], *ALGORITHMS[algorithm], *KINDS[kind],
    )
    for size, family, algorithm, kind in itertools.product(SIZES, FAMILIES, ALGORITHMS, KINDS)
}  # fmt: skip
EXPERIMENTS = sorted(LAYERS)
AUTHORS = ["authors/qwen_grpo_tango", "authors/qwen_rloo_tango", "authors/qwen_reinforce_pp_tango"]
LAYERS |= {
    "authors/qwen_grpo_tango": ("paper/authors.yaml",),
    "authors/qwen_rloo_tango": ("paper/authors.yaml", "methods/rloo.yaml"),
    "authors/qwen_reinforce_pp_tango": (
        "paper/authors.yaml", "methods/reinforce_pp.yaml", "algorithm.kl_estimator=k2", "algorithm.entropy_coef=0.0",
    ),
    "authors/eval_qwen": ("paper/eval_authors.yaml",),
    "eval_qwen": ("paper/eval.yaml",),
    "eval_qwen_samples": ("paper/samples.yaml",),
    "eval_llama": ("paper/eval.yaml", "paper/eval_llama.yaml"),
    "eval_llama_samples": ("paper/samples.yaml", "paper/eval_llama.yaml"),
    "teacher": ("paper/teacher.yaml",),
}  # fmt: skip
EVALUATIONS = [name for name in LAYERS if name.startswith("eval_")]


def arguments(name: str) -> list[str]:
    """What a command takes for the experiment: files, and settings."""
    return [layer if "=" in layer else str(CONFIGS / layer) for layer in LAYERS[name]]


def recipe(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of an experiment."""
    first, *more = arguments(name)
    return load_config(Path(first), [*more, *overrides])
