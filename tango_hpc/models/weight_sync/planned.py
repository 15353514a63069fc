"""The bytes that weight sync will move and hold, from a configuration alone: the `reshard` section of `tango plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.base.config.models import role_shape
from tango_hpc.base.model_shape import ELEMENT_BYTES
from tango_hpc.models.weight_sync.plan import Layouts, build_plan


def plan_report(config: Config) -> dict[str, Any]:
    """Return for each trained model `{"ranks": [...], "total": {...}, "ratio_to_minimum": ...}`.

    An entry of `ranks` has the fields of `RankTotals`; `total` has their sums, except that `peak_extra_bytes` and
    `buckets` are the largest of any rank. Loads no weights; needs the model's config.json, or `model.build`.
    """
    return {name: _role_report(config, name) for name, role in config.models.items() if role.trainable}


def _role_report(config: Config, name: str) -> dict[str, Any]:
    role = config.models[name]
    layouts = Layouts(
        shape=role_shape(config, name),
        world_size=config.world_size,
        tensor=role.parallel.tensor,
        pipeline=role.parallel.pipeline,
        rollout_tensor=role.rollout.tensor,
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
