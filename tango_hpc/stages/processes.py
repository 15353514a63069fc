"""Which processes a rank of a stage consists of. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from tango_hpc.base.config import Config
from tango_hpc.stages.eval_inputs import evaluated_roles

TRAINER = "trainer"  # the one process of a rank that fine-tunes: the roles take turns in it, without an engine
# Fine-tuning has less on a GPU than the training of the same role, and nothing waits on the host.
PlannedStage = Literal["train", "eval", "teacher"]


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


def as_in_stage(config: Config, stage: PlannedStage) -> Config:
    """`config` with the roles that take part in `stage`; an evaluation and a teacher train none of them."""
    if stage == "train":
        return config
    frozen = {name: role.model_copy(update={"trainable": False}) for name, role in config.roles.items()}
    taking_part = process_roles(config, stage)
    verifier = frozen["verifier"] if "verifier" in taking_part else None
    return config.model_copy(update={"generator": frozen["generator"], "verifier": verifier})
