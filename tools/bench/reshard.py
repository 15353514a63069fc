"""`python -m tools.bench reshard`: three ways of bringing new weights into the engine, in one run, with one model.

1. shard to shard: this package's weight sync;
2. gather: every full tensor on every rank, then the engine's own loader, as other colocated systems do;
3. disk: save safetensors, then the engine's own loader.

Each is timed several times between barriers, and followed by a comparison of checksums, so that a way that is fast
and wrong is not counted.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tango_hpc.base.config import Config, config_to_yaml, load_config
from tango_hpc.base.config.roles import TinyModelConfig
from tango_hpc.base.errors import UserError
from tango_hpc.runner.environment import threads_of_rank
from tools.bench.local_ranks import run_on_ranks
from tools.bench.measure import Measurement
from tools.bench.peak_memory import PeakMemory
from tools.bench.workload import make_model, read_settings, run_config, write_settings

if TYPE_CHECKING:
    import torch

_MODEL = TinyModelConfig(hidden_size=768, intermediate_size=2048, num_layers=8, num_heads=12, num_kv_heads=4,
                         tie_embeddings=False)  # fmt: skip
REPEATS = 5


def measure(folder: Path, repeats: int) -> list[Measurement]:
    """Shard to shard against gather and reload, on the model and the layouts of `tools/bench/reshard.yaml`."""
    # As many ranks as there are cores to run them, cut by the pipeline; four ranks of two cores would measure the
    # queue.
    work = folder / "reshard"
    work.mkdir()
    result = run_bench(load_config(run_config(work, make_model(work / "model", _MODEL), verifier=False, steps=1),
                                   ["generator.parallel={tensor: 2}"]), repeats)  # fmt: skip
    ours, gather, _disk = result["rows"]
    wrong = sum(row["mismatches"] for row in result["rows"])
    if wrong:
        raise RuntimeError(f"{wrong} tensors of the engine are not the trainer's after a weight sync")
    ratios = [other / mine for mine, other in zip(ours["all_seconds"], gather["all_seconds"], strict=True)]
    what = f"weight sync, {result['parameters'] / 1e6:.0f}M parameters, TP=2 to TP=1"
    minimum = result["minimum_bytes"]
    return [
        Measurement("reshard", what, "gather and reload", "s", ours["all_seconds"], gather["all_seconds"], ratios, 2.0),
        Measurement("reshard-bytes", what, "the lower bound", "bytes", [ours["moved_bytes"]], [minimum],
                    [ours["moved_bytes"] / minimum], 1.0, False),
    ]  # fmt: skip


def run_bench(config: Config, repeats: int = REPEATS) -> dict[str, Any]:
    """Measure the generator's weight sync on `launch.tasks_per_node` local ranks; the result, also of all repeats.

    Where `generator.model.path` does not exist, the model of `generator.model.build` is made in a temporary folder.
    """
    if config.launch.nodes > 1:
        raise UserError("launch.nodes: python -m tools.bench runs on one machine; set it to 1")
    with tempfile.TemporaryDirectory(prefix="tango-bench-") as name:
        folder = Path(name)
        config = _with_model(config, folder)
        (folder / "config.yaml").write_text(config_to_yaml(config))
        write_settings(folder, {"repeats": repeats})
        threads = threads_of_rank(config.launch)
        return run_on_ranks(
            "tools.bench.reshard:on_rank",
            folder,
            ranks=config.world_size,
            threads=threads,
            device=config.launch.device,
        )


def _with_model(config: Config, folder: Path) -> Config:
    model = config.generator.model
    if model.path.exists():
        return config
    if model.build is None:
        raise UserError(f"generator.model.path: no folder at {model.path}, and no generator.model.build to make one")
    from tango_hpc.questions.tasks.tiny import build_tiny_model

    build_tiny_model(folder / "model", model.build, config.seed)
    built = model.model_copy(update={"path": folder / "model"})
    generator = config.generator.model_copy(update={"model": built})
    return config.model_copy(update={"generator": generator})


def on_rank(folder: Path) -> dict[str, Any]:
    """One rank of the benchmark."""
    config = load_config(folder / "config.yaml")
    repeats = read_settings(folder)["repeats"]
    import torch.distributed as dist

    from tango_hpc.models.trainer.policy import Policy
    from tango_hpc.models.weight_sync.sync import WeightSync
    from tango_hpc.stages.model_worker import make_engine
    from tools.bench.gather import FullGather

    role = config.generator
    policy = Policy(role, config.launch.dtype)
    engine = make_engine(
        role, config, "generator", load_weights=True
    )  # vLLM reloads from disk only what it has loaded from disk
    sync = WeightSync(policy, engine, config.reshard.model_copy(update={"verify": "never"}))
    gather = FullGather(policy.shape, policy.groups, engine.dtype, engine.device)
    folders = iter(range(1000))

    def shard_to_shard() -> None:
        sync.sync()

    def full_gather() -> None:
        engine.reload(gather.tensors(policy.named_shards()))

    def disk() -> None:
        target = folder / f"saved-{next(folders)}"
        policy.export_hf(target)
        engine.reload(target)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target)

    full = policy.shape.num_parameters * engine.dtype.itemsize
    ways: list[tuple[str, Callable[[], None], int]] = [
        ("shard to shard", shard_to_shard, sum(total.sent_bytes for total in sync.totals)),
        ("gather + loader", full_gather, sum(total.gather_bytes for total in sync.totals)),
        ("safetensors + reload", disk, full * (1 + dist.get_world_size())),
    ]
    rows = [
        {
            "way": name,
            **_time_of(policy.named_shards(), way, repeats),
            "moved_bytes": moved,
            "mismatches": len(sync.find_mismatches()),
        }
        for name, way, moved in ways
    ]
    return {
        "repeats": repeats,
        "minimum_bytes": sum(total.minimum_bytes for total in sync.totals),
        "parameters": policy.shape.num_parameters,
        "ranks": dist.get_world_size(),
        "training": {"tensor": role.parallel.tensor, "pipeline": role.parallel.pipeline},
        "rollout": {"tensor": role.rollout.tensor},
        "dtype": config.launch.dtype,
        "device": config.launch.device,
        "rows": rows,
    }


def _time_of(shards: dict[str, torch.Tensor], way: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Change the weights and bring them to the engine, `repeats` times; return seconds and peak memory, the largest of
    all ranks.
    """
    import torch
    import torch.distributed as dist

    from tango_hpc.models.parallel.collectives import max_over_ranks

    times, peaks = [], []
    for _ in range(repeats + 1):  # the first warms up
        with torch.no_grad():
            for shard in shards.values():
                shard.mul_(1.0009765625)  # new weights; exact in both precisions for most
        dist.barrier()
        with PeakMemory() as memory:
            start = time.monotonic()
            way()
            dist.barrier()
            seconds = time.monotonic() - start
        most = max_over_ranks([seconds, memory.peak_bytes])
        times.append(most[0])
        peaks.append(most[1])
    return {
        "seconds": statistics.median(times[1:]),
        "all_seconds": times[1:],
        "peak_extra_bytes": int(statistics.median(peaks[1:])),
    }


def render(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    training, first = result["training"], result["rows"][0]
    lines = [
        f"{result['parameters'] / 1e6:.1f}M parameters in {result['dtype']} on {result['ranks']} {result['device']} "
        f"ranks: training TP={training['tensor']} x PP={training['pipeline']}, "
        f"rollout TP={result['rollout']['tensor']}; median of {result['repeats']}",
        "",
        "| way | seconds | slower than shard to shard | MB moved | peak extra MB on a rank | wrong tensors |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['way']} | {row['seconds']:.3f} | {row['seconds'] / first['seconds']:.2f}x | "
            f"{row['moved_bytes'] / 1e6:.1f} | {row['peak_extra_bytes'] / 1e6:.1f} | {row['mismatches']} |"
        )
    return "\n".join(lines)
