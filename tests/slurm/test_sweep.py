"""A sweep as a job array on the test cluster, with counting ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tango_hpc.commands.sweep import cell_states, load_sweep
from tango_hpc.commands.sweep_submit import array_size
from tango_hpc.runner import slurm
from tests.slurm.jobs import PROFILE, counting_config, tango, wait_until

pytestmark = pytest.mark.usefixtures("cluster")


def test_four_cells_of_which_one_is_bad(tmp_path: Path) -> None:
    folder = tmp_path / "a sweep"
    counting_config(folder, "base")
    file = folder / "sweep.yaml"
    sweep_tree = {
        "config": "base.yaml", "dir": str(folder / "out"), "grid": {"algorithm.advantages.generator.name": ["grpo", "rloo"]},
        "seeds": [0, 1], "throttle": 4, "overrides": ["launch.nodes=1"],
    }  # fmt: skip
    file.write_text(yaml.safe_dump(sweep_tree))
    profile = folder / "profile.yaml"
    profile.write_text(yaml.safe_dump({"time": "10", "env": PROFILE.env}))
    cells = load_sweep(file).cells

    def behave(index: int, **more: object) -> None:
        run = cells[index].directory.path
        run.parent.mkdir(parents=True, exist_ok=True)
        behaviour = {"steps": 3, "results": {"generator.accuracy_after": index / 10}} | more
        run.with_name(f"{run.name}.behaviour.json").write_text(json.dumps(behaviour))

    for index in range(4):
        behave(index)
    behave(2, rank=0, step=1, action="fail")
    listed = tango("sweep", str(file), "--dry-run").stdout
    assert "4 cells of 1 x 1 ranks, 4 at once" in listed and "name=rloo" in listed

    tango("sweep", str(file), "--profile", str(profile))
    wait_until(lambda: all(state.is_over for state in cell_states(cells)), lambda: repr(cell_states(cells)))
    assert [state.state for state in cell_states(cells)] == ["done", "done", "failed", "done"]
    array = {state.job.partition("_")[0] for state in cell_states(cells) if state.job}
    assert len(array) == 2  # of three tasks at most
    bad = tango("logs", str(cells[2].directory.path)).stdout
    assert bad.startswith("rank 0 (generator) on ") and "ValueError: the loss went for a walk" in bad

    shown = tango("sweep", str(file), "--results").stdout
    assert shown.index("name=rloo") < shown.index("name=grpo")  # 0.3 alone before the mean of 0.0 and 0.1
    assert "cell name=rloo, seed 0 failed: rank 0" in shown
    table = pq.read_table(folder / "out" / "results.parquet").to_pydict()
    assert table["state"] == ["done", "done", "failed", "done"]
    assert table["result/generator.accuracy_after"] == [0.0, 0.1, None, 0.3]
    assert "<svg" in (folder / "out" / "results.html").read_text()

    refused = tango("sweep", str(file), "--profile", str(profile), check=False)
    assert refused.returncode == 2 and "--resubmit" in refused.stderr
    behave(2)
    tango("sweep", str(file), "--profile", str(profile), "--resubmit")
    wait_until(lambda: all(state.is_over for state in cell_states(cells)), lambda: repr(cell_states(cells)))
    states = cell_states(cells)
    assert [state.state for state in states] == ["done"] * 4
    assert [state.attempts for state in states] == [1, 1, 2, 1]
    assert "done, waiting or running" in tango("sweep", str(file), "--profile", str(profile), "--resubmit").stdout
    assert slurm.run_command("squeue", "--noheader").strip() == ""

    # A seed more, before the others: what is there stays, and is found again.
    assert array_size(slurm.run_command("scontrol", "show", "config")) == 3
    file.write_text(yaml.safe_dump(sweep_tree | {"seeds": [2, 0, 1]}))
    before = {cell.directory.path for cell in cells}
    cells = load_sweep(file).cells
    assert before < {cell.directory.path for cell in cells} and len(cells) == 6
    for index in (0, 3):
        behave(index)
    told = tango("sweep", str(file), "--profile", str(profile)).stdout
    assert "4 cells are there and stay as they are: 4 done." in told and "Submitted 2 cells as job array" in told
    wait_until(lambda: all(state.is_over for state in cell_states(cells)), lambda: repr(cell_states(cells)))
    assert [(state.state, state.attempts) for state in cell_states(cells)] == [
        ("done", 1), ("done", 1), ("done", 1), ("done", 1), ("done", 2), ("done", 1)
    ]  # fmt: skip
    tango("sweep", str(file), "--results")
    table = pq.read_table(folder / "out" / "results.parquet").to_pydict()
    assert table["result/generator.accuracy_after"] == [0.0, 0.0, 0.1, 0.3, 0.2, 0.3]
    shown = tango("status", str(folder / "out")).stdout.splitlines()
    assert len(shown) == 7, shown
    assert [line for line in shown[1:] if " train COMPLETED " not in line] == []
