"""The benchmark of weight sync runs, and every way that it times leaves the trainer's weights in the engine."""

from __future__ import annotations

from pathlib import Path

from tango_hpc.base.config import load_config
from tango_hpc.models.weight_sync.planned import plan_report
from tools.bench.reshard import render, run_bench

CONFIG = Path(__file__).parents[2] / "tools/bench/reshard.yaml"


def test_all_three_ways_are_right(tmp_path: Path) -> None:
    build = "{hidden_size: 128, intermediate_size: 128, num_layers: 2, num_heads: 4, num_kv_heads: 2}"
    overrides = [
        f"run.dir={tmp_path / 'run'}", "launch.tasks_per_node=2", "generator.parallel={pipeline: 2}",
        f"generator.model.build={build}", "reshard.bucket_mb=0.05",
    ]  # fmt: skip
    config = load_config(CONFIG, overrides)
    result = run_bench(config)
    assert [row["way"] for row in result["rows"]] == ["shard to shard", "gather + loader", "safetensors + reload"]
    assert [row["mismatches"] for row in result["rows"]] == [0, 0, 0]
    total = plan_report(config)["generator"]["total"]
    assert [row["moved_bytes"] for row in result["rows"]][:2] == [total["minimum_bytes"], total["gather_bytes"]]
    assert total["sent_bytes"] == total["received_bytes"] == total["minimum_bytes"]
    assert "TP=1 x PP=2, rollout TP=2" in render(result)
