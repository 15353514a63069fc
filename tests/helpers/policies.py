"""Trainers of model folders, without a run around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal


def policy_of(
    model_dir: Path | str,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    sequence: bool = False,
    dtype: str = "float32",
    micro_batch_tokens: int = 256,
    max_response_tokens: int = 2048,
    reference_dir: Path | None = None,
    recompute: Literal["none", "selective", "full"] = "none",
    adapter: Any = None,
    **options: Any,
) -> Any:
    """A `Policy` cut this way, frozen unless `options` have an optimizer. `adapter`: an AdapterConfig or None."""
    from tango_hpc.base.config.roles import ModelConfig, ParallelConfig, RoleConfig
    from tango_hpc.models.trainer.policy import Policy

    settings = RoleConfig(
        model=ModelConfig(path=Path(model_dir), reference_path=reference_dir),
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence),
        micro_batch_tokens=micro_batch_tokens,
        max_response_tokens=max_response_tokens,
        recompute=recompute,
        adapter=adapter,
    )
    return Policy(settings, dtype, **options)
