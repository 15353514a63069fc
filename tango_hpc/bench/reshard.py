"""`tango bench reshard`: three ways of bringing new weights into the engine, in one run, with one model.

1. shard to shard: this package's weight sync;
2. gather: every full tensor on every rank, then the engine's own loader, as other colocated systems do;
3. disk: save safetensors, then the engine's own loader.

Each is timed several times between barriers, and followed by a comparison of checksums, so that a way that is fast
and wrong is not counted. `python -m tango_hpc.bench.reshard CONFIG OUT` is one rank.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tango_hpc.config import Config, config_to_yaml, load_config
from tango_hpc.errors import UserError
from tango_hpc.launch.environment import threads_of_rank

REPEATS = 5


def run_bench(config: Config) -> dict[str, Any]:
    """Measure the generator's weight sync on `launch.tasks_per_node` local ranks; the result, also of all repeats.

    Where `generator.model.path` does not exist, the model of `generator.model.build` is made in a temporary folder.
    """
    if config.launch.nodes > 1:
        raise UserError("launch.nodes: tango bench runs on one machine; set it to 1")
    with tempfile.TemporaryDirectory(prefix="tango-bench-") as folder:
        config = _with_model(config, Path(folder))
        (Path(folder) / "config.yaml").write_text(config_to_yaml(config))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        world = str(config.world_size)
        environment = os.environ | {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads_of_rank(config.launch)),
        }
        words = [sys.executable, "-P", "-m", "tango_hpc.bench.reshard", folder]
        ranks = [
            subprocess.Popen(words, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(config.world_size)
        ]
        _await(ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def _await(ranks: Sequence[subprocess.Popen]) -> None:
    """Wait for all; the first to fail ends the others."""
    try:
        running = True
        while running:
            codes = [rank.poll() for rank in ranks]
            failed = [number for number, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                raise RuntimeError(f"rank {failed[0]} of the benchmark failed; its error is above")
            running = None in codes
            time.sleep(0.1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def _with_model(config: Config, folder: Path) -> Config:
    model = config.generator.model
    if model.path.exists():
        return config
    if model.build is None:
        raise UserError(f"generator.model.path: no folder at {model.path}, and no generator.model.build to make one")
    from tango_hpc.tasks.tiny import build_tiny_model

    build_tiny_model(folder / "model", model.build, config.seed)
    built = model.model_copy(update={"path": folder / "model"})
    generator = config.generator.model_copy(update={"model": built})
    return config.model_copy(update={"generator": generator})


def rank_main(folder: Path) -> None:
    """One rank of the benchmark; rank 0 writes `result.json`."""
    config = load_config(folder / "config.yaml")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads_of_rank(config.launch))
    from tango_hpc.bench.gather import FullGather
    from tango_hpc.parallel.collectives import max_over_ranks
    from tango_hpc.parallel.ranks import init_distributed, shutdown_distributed
    from tango_hpc.policy.policy import Policy
    from tango_hpc.reshard.sync import WeightSync
    from tango_hpc.stages.role_worker import make_engine

    init_distributed(config.launch.collective_timeout_seconds)
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
    rows: list[dict[str, Any]] = []
    for name, way, moved in ways:
        times, peaks = [], []
        for _ in range(REPEATS + 1):  # the first warms up
            with torch.no_grad():
                for shard in policy.named_shards().values():
                    shard.mul_(1.0009765625)  # new weights; exact in both precisions for most
            dist.barrier()
            with _PeakMemory() as memory:
                start = time.monotonic()
                way()
                dist.barrier()
                seconds = time.monotonic() - start
            most = max_over_ranks([seconds, memory.peak_bytes])
            times.append(most[0])
            peaks.append(most[1])
        rows.append(
            {
                "way": name,
                "seconds": statistics.median(times[1:]),
                "all_seconds": times[1:],
                "moved_bytes": moved,
                "peak_extra_bytes": int(statistics.median(peaks[1:])),
                "mismatches": len(sync.find_mismatches()),
            }
        )
    result = {
        "parameters": policy.shape.num_parameters,
        "ranks": dist.get_world_size(),
        "training": {"tensor": role.parallel.tensor, "pipeline": role.parallel.pipeline},
        "rollout": {"tensor": role.rollout.tensor},
        "dtype": config.launch.dtype,
        "device": config.launch.device,
        "rows": rows,
    }
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    shutdown_distributed()


class _PeakMemory:
    """Memory above the start: of the GPU where there is one, else resident memory of this process, sampled."""

    def __enter__(self) -> _PeakMemory:
        import torch

        self._gpu = torch.cuda.is_available()
        self.peak_bytes = 0
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return self
        self._start = _resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._gpu:
            import torch

            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._start
            return
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _resident_bytes() - self._start)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def render(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    training, first = result["training"], result["rows"][0]
    lines = [
        f"{result['parameters'] / 1e6:.1f}M parameters in {result['dtype']} on {result['ranks']} {result['device']} "
        f"ranks: training TP={training['tensor']} x PP={training['pipeline']}, "
        f"rollout TP={result['rollout']['tensor']}; median of {REPEATS}",
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


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
