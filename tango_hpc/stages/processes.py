"""Which processes a rank of a stage consists of. Imports neither torch nor vLLM."""

from __future__ import annotations

from tango_hpc.config import Config
from tango_hpc.stages.eval_inputs import evaluated_roles

TRAINER = "trainer"  # the one process of a rank that fine-tunes: the roles take turns in it, without an engine


def process_roles(config: Config, stage: str) -> list[str]:
    """The processes that each rank of `stage` starts, by the role that each of them plays.

    `train`: generator, and verifier where there is one; `eval`: those that are asked; `teacher`: the generator;
    `sft`: "trainer". Raises `ValueError` for any other stage.
    """
    if stage == "train":
        return list(config.roles)
    if stage == "eval":
        return evaluated_roles(config)
    if stage == "teacher":
        return ["generator"]
    if stage == "sft":
        return [TRAINER]
    raise ValueError(f"no stage {stage!r} has ranks")
