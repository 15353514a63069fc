"""`tango eval` with a real engine and a real verifier: an interrupted evaluation asks no turn twice and says the same."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tango_hpc.run.directory import RunDirectory
from tango_hpc.run.summary import read_summary
from tests.helpers.attempts import Attempt, make_attempts
from tests.helpers.runs import prepare_small_run

SETTINGS = ("eval.benchmarks=[task]", "eval.samples=2", "eval.verifier_samples=2")
GREEDY, SAMPLE_1, SAMPLE_2, JUDGING_2 = (
    f"task of model, {turn}"
    for turn in ("greedy", "sample 1 of 2", "sample 2 of 2", "judging sample 2 of 2, time 1 of 2")
)
JUDGED = {"judging_greedy_time_1_of_2", "judging_sample_1_of_2_time_1_of_2"}

Runs = dict[str, RunDirectory]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("evaluations")
    return {name: prepare_small_run(folder / name, *SETTINGS)[1] for name in ("straight", "interrupted")}


def turns(directory: RunDirectory) -> dict[str, int]:
    """When each turn that is kept was written."""
    folder = directory.path / "eval/model/task.turns"
    return {file.stem: file.stat().st_mtime_ns for file in sorted(folder.glob("*.parquet"))}


def test_an_interrupted_evaluation_asks_no_turn_twice_and_says_the_same(runs: Runs, tmp_path: Path) -> None:
    straight, interrupted = runs["straight"], runs["interrupted"]
    path = str(interrupted.path)
    attempts = [
        Attempt(str(straight.path), "eval"),
        Attempt(path, "eval", stop=(SAMPLE_2, 1)),
        Attempt(path, "eval", kill=(1, "verifier", JUDGING_2, 1)),
    ]
    assert [task.code for task in make_attempts(tmp_path, attempts)] == [0, 85, 1]
    before = turns(interrupted)
    assert set(before) == {"greedy", "sample_1_of_2", "sample_2_of_2"} | JUDGED
    assert before["greedy"] < before["sample_1_of_2"] < before["sample_2_of_2"] < min(before[name] for name in JUDGED)

    # A turn that was asked otherwise, or is damaged, is asked again: sampled at another temperature, and cut off.
    for place in (SAMPLE_1, GREEDY):
        kept = interrupted.path / f"eval/model/task.turns/{place.split(', ')[1].replace(' ', '_')}.parquet"
        content = kept.read_bytes()
        kept.write_bytes(
            content.replace(b'"temperature": 1.0', b'"temperature": 0.5') if place == SAMPLE_1 else b"PAR1"
        )
        assert kept.read_bytes() != content
    again = [Attempt(path, "eval", stop=(JUDGING_2, 1)), Attempt(path, "eval")]
    second = make_attempts(tmp_path, again[:1])
    after = turns(interrupted)
    assert {name for name in before if after[name] == before[name]} == JUDGED | {"sample_2_of_2"}
    assert [task.code for task in [*second, *make_attempts(tmp_path, again[1:])]] == [85, 0]

    answers = [pq.read_table(run.path / "eval/model/task.parquet") for run in (straight, interrupted)]
    assert answers[0].num_rows == 8 * 3 and answers[0].equals(answers[1])
    assert not turns(straight) and not turns(interrupted)
    stage = read_summary(interrupted)["stages"]["eval"]
    assert (stage["status"], stage["steps"], stage["attempts"]) == ("done", 1, 4)
