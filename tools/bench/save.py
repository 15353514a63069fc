"""`python -m tools.bench save`: what its checksums cost a checkpoint, of a whole trainer with its optimizer, on this
disk.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tango_hpc.base.config.roles import TinyModelConfig
from tools.bench.local_ranks import run_on_ranks
from tools.bench.measure import Measurement
from tools.bench.workload import make_model, read_settings, write_settings

_MODEL = TinyModelConfig(hidden_size=768, intermediate_size=2048, num_layers=8, num_heads=12, num_kv_heads=4)


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """Seconds of a save with checksums against one without, in one process."""
    model = make_model(folder / "model", _MODEL)
    write_settings(folder / "save", {"model": str(model), "repeats": repeats})
    found = run_on_ranks("tools.bench.save:on_rank", folder / "save", ranks=1, threads=1)
    ours, plain = found["seconds"]["ours"], found["seconds"]["plain"]
    ratios = [mine / other for mine, other in zip(ours, plain, strict=True)]
    what = f"a checkpoint of {found['bytes'] / 1e6:.0f} MB"
    return [Measurement("save", what, "the same without checksums", "s", ours, plain, ratios, 1.1, False)]


def on_rank(folder: Path) -> dict[str, Any]:
    """Everything, in one process."""
    from isal.isal_zlib import crc32

    from tango_hpc.base.config.roles import ModelConfig, OptimizerConfig, RoleConfig
    from tango_hpc.base.run import manifest
    from tango_hpc.base.types import TrainSequence
    from tango_hpc.models.trainer.policy import Policy

    settings = read_settings(folder)
    role = RoleConfig(model=ModelConfig(path=Path(settings["model"])))
    policy = Policy(role, "bfloat16", optimizer=OptimizerConfig(), total_steps=10)
    policy.update_sft([TrainSequence([5, 6], [7, 8])])
    out, seconds = folder / "checkpoint", {"ours": list[float](), "plain": list[float]()}
    for turn in range(-1, settings["repeats"]):
        for arm in ("ours", "plain") if turn % 2 else ("plain", "ours"):
            with patch.object(manifest, "crc32", crc32 if arm == "ours" else lambda *_: 0):
                start = time.perf_counter()
                policy.save(out)
                taken = time.perf_counter() - start
            size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            shutil.rmtree(out)
            if turn >= 0:
                seconds[arm].append(taken)
    return {"seconds": seconds, "bytes": size}
