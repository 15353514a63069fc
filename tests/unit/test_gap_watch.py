"""The note that comes before a log-probability gap ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tango_hpc.config.schema import TrainConfig
from tango_hpc.control.stop import StopSignal
from tango_hpc.launch.enter import enter_run
from tango_hpc.run.worker import Worker
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.tango import Tango
from tango_hpc.stages.update import GapWatch

CONFIGS = Path(__file__).parents[2] / "configs"


def test_it_tells_once_per_crossing_of_half_the_limit_and_per_role() -> None:
    watch = GapWatch(0.05)
    gaps = [("generator", 0.024), ("generator", 0.025), ("generator", 0.04), ("verifier", 0.03), ("verifier", 0.03)]
    assert [watch.observe(*gap) for gap in gaps] == [False, True, False, True, False]
    assert [watch.observe("generator", gap) for gap in (0.01, 0.03)] == [False, True]
    assert not GapWatch(None).observe("generator", 10.0)


def test_a_resumed_watch_tells_what_an_uninterrupted_one_would() -> None:
    gaps = [0.01, 0.03, 0.03, 0.01, 0.04, 0.04]
    uninterrupted = GapWatch(0.05)
    whole = [uninterrupted.observe("verifier", gap) for gap in gaps]
    assert whole == [False, True, False, False, True, False]
    for stop in range(len(gaps)):
        first, second = GapWatch(0.05), GapWatch(0.05)
        told = [first.observe("verifier", gap) for gap in gaps[:stop]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert told + [second.observe("verifier", gap) for gap in gaps[stop:]] == whole


def test_the_note_reaches_whoever_looks_at_the_run(tmp_path: Path) -> None:
    directory = enter_run(tmp_path / "run", "seed: 0\n", resume=False)[0]
    stop = StopSignal(directory, Worker(0, "generator"), reads_file=False)
    tango = object.__new__(Tango)  # without roles: nothing but what the note needs
    tango.step, tango.gaps = 3, GapWatch(TrainConfig().max_logprob_gap)
    tango.journal = Journal(directory, "train", stop, total_steps=9, resumed_step=0, writes=True)
    for gap in (0.02, 0.031, 0.04):
        tango._watch_gap("verifier", gap)
    (note,) = json.loads(directory.progress.read_text())["notes"]
    assert note == (
        "at step 3 engine and trainer of the verifier differ by 0.031 in the mean log-probability of a sampled token "
        "(logprob_gap/mean_abs); above 0.05 (train.max_logprob_gap) the run ends"
    )


def test_the_limits() -> None:
    """Others see 0.01 to 0.02 in bf16; fp32 agrees to 1e-5; eight layers of half a billion parameters gave 0.041."""
    trains = {
        name: yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["train"] for name in ("quickstart", "half_billion")
    }
    assert {name: train["max_logprob_gap"] for name, train in trains.items()} == {
        "quickstart": 0.01,
        "half_billion": 0.1,
    }
    assert TrainConfig().max_logprob_gap == 0.05
