"""What weight sync will move and hold, from a configuration alone: the `reshard` section of `tango plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tango_hpc.config import Config
from tango_hpc.config.checks import model_dimensions
from tango_hpc.errors import UserError
from tango_hpc.model.shape import ModelShape
from tango_hpc.reshard.plan import Layouts, build_plan
from tango_hpc.tasks.tiny import VOCABULARY_SIZE

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def plan_report(config: Config) -> dict[str, Any]:
    """For each role that is trained, `{"ranks": [...], "total": {...}, "ratio_to_minimum": ...}`.

    An entry of `ranks` has the fields of `RankTotals`; `total` has their sums, except that `peak_extra_bytes` and
    `buckets` are the largest of any rank. Loads no weights; needs the model's config.json, or `model.build`.
    """
    return {name: _role_report(config, name) for name, role in config.roles.items() if role.trainable}


def role_shape(config: Config, name: str) -> ModelShape:
    """The shape of a role's model: from its config.json, from the model that it is fine-tuned from, or from the tiny
    model that is still to be built."""
    model = config.roles[name].model
    dimensions = model_dimensions(model, config)
    if dimensions is None:
        raise UserError(f"{name}.model.path: no config.json in {model.path}; the plan needs the model's sizes")
    return ModelShape.from_hf_config({"vocab_size": VOCABULARY_SIZE, **dimensions})


def _role_report(config: Config, name: str) -> dict[str, Any]:
    role = config.roles[name]
    layouts = Layouts(
        shape=role_shape(config, name),
        world_size=config.world_size,
        tensor=role.parallel.tensor,
        pipeline=role.parallel.pipeline,
        rollout_tensor=config.rollout.tensor,
        ranks_per_node=config.launch.tasks_per_node,
    )
    plan = build_plan(
        layouts,
        element_bytes=ELEMENT_BYTES[config.launch.dtype],
        bucket_bytes=int(config.reshard.bucket_mb * 2**20),
    )
    ranks = [asdict(totals) for totals in plan.totals]
    largest = ("peak_extra_bytes", "buckets")
    total = {key: (max if key in largest else sum)(rank[key] for rank in ranks) for key in ranks[0] if key != "rank"}
    minimum = total["minimum_bytes"]
    return {"total": total, "ratio_to_minimum": total["received_bytes"] / minimum if minimum else 1.0, "ranks": ranks}
