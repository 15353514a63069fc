"""`tango eval` with a real engine and a real verifier: an interrupted evaluation asks no turn twice and says
the same.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.manifest import total_bytes
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.base.run.summary import read_summary
from tango_hpc.base.run.weights_alone import is_whole
from tango_hpc.stages.convert import export_run
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


@pytest.mark.timeout(900)
def test_weights_alone_are_evaluated_and_exported_like_the_whole_checkpoint(tmp_path: Path) -> None:
    """The same training twice: one run keeps all checkpoints whole, the other one whole and the weights of two
    before.
    """
    short = ("train.generator_steps=2", "train.eval_every=0", "eval.benchmarks=[task]", "eval.checkpoints=all")
    settings = ("launch.dtype=bfloat16", "checkpoint.every_steps=1", "algorithm.entropy_coef=0.5", *short)
    kept = {"whole": ("checkpoint.keep=9",), "alone": ("checkpoint.keep=1", "checkpoint.keep_weights=2")}
    runs = {name: prepare_small_run(tmp_path / name, *settings, *keep)[1] for name, keep in kept.items()}
    attempts = [Attempt(str(run.path), stage) for stage in ("train", "eval") for run in runs.values()]
    assert [task.code for task in make_attempts(tmp_path, attempts)] == [0] * 4
    steps = ["step_000001", "step_000002", "step_000003"]
    for name, whole in (("whole", [True] * 3), ("alone", [False, False, True])):
        saved = steps_in(runs[name].checkpoints / "train")
        assert [path.name for _, path in saved] == steps
        assert [is_whole(path) for _, path in saved] == whole
        assert [any(path.rglob("*training.distcp")) for _, path in saved] == whole
    sizes = [total_bytes(runs[name].checkpoints / "train" / steps[0]) for name in runs]
    assert sizes[0] is not None and sizes[1] is not None and sizes[1] < 0.25 * sizes[0]
    for step in steps:
        answers = [pq.read_table(run.path / "eval" / step / "task.parquet") for run in runs.values()]
        assert answers[0].num_rows == 8 and answers[0].equals(answers[1])
    exported = {}
    for name, run in runs.items():
        for step in (1, 3):
            export_run(run.path, "generator", tmp_path / f"{name} {step}", step)
            exported[name, step] = (tmp_path / f"{name} {step}/model.safetensors").read_bytes()
    assert exported["whole", 1] == exported["alone", 1] != exported["alone", 3]
