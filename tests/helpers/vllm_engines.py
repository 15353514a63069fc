"""Small engines for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_engine(model_dir: Path, tensor: int, load_weights: bool, dtype: str = "float32") -> Any:
    """A `RolloutEngine` with room for a few short sequences."""
    from tango_hpc.models.engine.engine import RolloutEngine

    return RolloutEngine(
        model_dir,
        tensor=tensor,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        max_batched_tokens=256,
        device="cpu",
        load_weights=load_weights,
        kv_cache_bytes=20 * 2**20,
    )
