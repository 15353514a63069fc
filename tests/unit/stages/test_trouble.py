"""Trouble in training: found by hand-made rows, told once, the same after a resume; and what is done about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tango_hpc.base.config.schema import TrainConfig
from tango_hpc.base.config.trouble import TroubleConfig
from tango_hpc.base.run.metrics import read_events, read_metrics
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.status import states
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.process import RankProcess
from tango_hpc.stages.journal import Journal
from tango_hpc.stages.judgement_counts import JudgementCounts
from tango_hpc.stages.trouble import Trouble, TroubleWatch, what_to_do

CONFIGS = Path(__file__).parents[3] / "configs"
QUIET: dict[str, Any] = {"skipped": False, "logprob_gap/mean_abs": 0.001, "entropy": 1.0}


def row(step: int, role: str = "generator", signal: float = 0.5, **values: Any) -> dict[str, Any]:
    return {"step": step, "role": role, "groups_with_signal": signal, **QUIET, **values}


def told(watch: TroubleWatch, rows: list[dict[str, Any]], verdicts: JudgementCounts | None = None) -> list[list[str]]:
    """The kinds of trouble that begin with each row."""
    return [[trouble.kind for trouble in watch.observe(entry, verdicts)[1]] for entry in rows]


def gaps(*values: float) -> list[dict[str, Any]]:
    return [row(step, **{"logprob_gap/mean_abs": value}) for step, value in enumerate(values, 1)]


def test_a_gap_of_half_the_limit_is_told_once_per_crossing_and_role() -> None:
    watch = TroubleWatch(0.05)
    rows = gaps(0.024, 0.025, 0.04)
    rows += [row(4, "verifier", **{"logprob_gap/mean_abs": 0.03}), row(5, "verifier", **{"logprob_gap/mean_abs": 0.03})]
    rows += gaps(0.01, 0.03)
    assert told(watch, rows) == [[], ["gap"], [], ["gap"], [], [], ["gap"]]
    assert told(TroubleWatch(None), gaps(10.0)) == [[]]


def test_a_gap_that_has_grown_fourfold_is_told_before_it_comes_near_the_limit() -> None:
    # First five: mean 0.002. After five more of 0.008 the last five have a mean of 0.008; 0.008 is above 0.05 / 10.
    watch = TroubleWatch(0.05)
    assert told(watch, gaps(*[0.002] * 5, *[0.008] * 5)) == [[]] * 9 + [["gap"]]
    metrics, _ = watch.observe(gaps(0.008)[0], None)
    assert metrics["trouble/gap_growth"] == pytest.approx(4.0)
    assert "4.0 times as much as in its first steps" in watch.active["generator, gap"]
    # The same growth far below the limit is nothing: fp32 agrees to 1e-6, and to 1e-5 later on.
    assert told(TroubleWatch(0.05), gaps(*[1e-6] * 5, *[1e-4] * 5)) == [[]] * 10


def test_entropy_that_collapses() -> None:
    entropies = [1.0] * 5 + [0.5] * 5 + [0.01] * 5
    watch = TroubleWatch(None)
    rows = [row(step, entropy=value) for step, value in enumerate(entropies, 1)]
    assert told(watch, rows) == [[]] * 14 + [["entropy"]]  # the mean of the last five is 0.01 at the 15th
    assert watch.observe(row(16, entropy=float("nan")), None)[0]["trouble/entropy_left"] == pytest.approx(0.01)


def test_equal_rewards_for_five_steps_of_a_role() -> None:
    silent = [row(step, signal=0.0) for step in range(1, 5)]
    between = [row(5, "verifier", signal=0.2)]
    assert told(TroubleWatch(None), [*silent, *between, row(6, signal=0.0), row(7, signal=0.0)]) == [[]] * 5 + [
        ["equal_rewards"],
        [],
    ]
    assert told(TroubleWatch(None), [*silent, row(5, signal=0.1), *silent]) == [[]] * 9


def test_an_update_that_was_left_out() -> None:
    assert told(TroubleWatch(None), [row(1, skipped=True), row(2, skipped=True), row(3), row(4, skipped=True)]) == [
        ["nonfinite"],
        [],
        [],
        ["nonfinite"],
    ]


GOOD, BAD = JudgementCounts(2, 2, 2, 0, 2, 0), JudgementCounts(2, 2, 0, 2, 0, 2)  # J = 1 and -1


def of_verdicts(watch: TroubleWatch, steps: list[JudgementCounts]) -> list[str | None]:
    """What is told of the verdicts at each step."""
    found = [watch.observe(row(step), counts)[1] for step, counts in enumerate(steps, 1)]
    return [troubles[0].text if troubles else None for troubles in found]


def test_verdicts_are_pooled_over_five_steps_and_told_once() -> None:
    watch = TroubleWatch(None)
    assert of_verdicts(watch, [BAD] * 4) == [None] * 4  # too few steps to say
    (text,) = of_verdicts(watch, [GOOD])
    assert text is not None and "(verifier/outcome_j) is -0.600 over the last 5 steps" in text  # 1/5 - 4/5
    assert of_verdicts(watch, [BAD, GOOD]) == [None, None]  # 2, 2 of five good: said already
    assert of_verdicts(watch, [GOOD]) == [None]  # 3 of five good: 3/5 - 2/5 is above 0
    first, second = of_verdicts(watch, [BAD, BAD])
    assert first is None and second is not None and "is -0.200" in second  # 3 of five, then 2: again


def test_verdicts_are_counted_by_items_not_steps() -> None:
    # Four small steps judge all rightly, one large one all wrongly: 8 of 28 right ones, 20 of 28 wrong ones judged
    # right.
    watch = TroubleWatch(None)
    assert "is -0.429" in str(of_verdicts(watch, [GOOD] * 4 + [JudgementCounts(20, 20, 0, 20, 0, 20)])[-1])


def test_always_the_same_verdict() -> None:
    assert "is 0.000" in str(of_verdicts(TroubleWatch(None), [JudgementCounts(2, 2, 2, 2, 0, 0)] * 5)[-1])
    # Only wrong solutions, all called wrong: J is not defined, and the verifier learns nothing.
    text = of_verdicts(TroubleWatch(None), [JudgementCounts(0, 40, 0, 0, 40, 0)] * 5)[-1]
    assert text is not None and "says 'incorrect' to 100.0% of all solutions of the last 5 steps" in text
    # 1 of 100 is right. Who finds it says "wrong" to 99%, and that is as it should be.
    assert of_verdicts(TroubleWatch(None), [JudgementCounts(1, 99, 1, 0, 99, 0)] * 5) == [None] * 5
    # 20 right, 80 wrong; one right one is found: J is 1/20, and 99 of 100 verdicts are the same.
    text = of_verdicts(TroubleWatch(None), [JudgementCounts(20, 80, 1, 0, 80, 19)] * 5)[-1]
    assert text is not None and "'incorrect' to 99.0%" in text and "J is 0.050" in text
    # Missing verdicts are neither.
    assert of_verdicts(TroubleWatch(None), [JudgementCounts(2, 0)] * 6) == [None] * 6


def test_a_resumed_watch_tells_what_an_uninterrupted_one_would() -> None:
    steps = [BAD, BAD, GOOD, GOOD, BAD, BAD, GOOD, GOOD, GOOD, BAD, BAD, BAD]
    rows = [
        row(step, signal=float(step < 6), entropy=1.0 / step**3, **{"logprob_gap/mean_abs": 0.01 * (step % 4)})
        for step in range(1, 13)
    ]

    def observe(watch: TroubleWatch, some: slice) -> list[Any]:
        return [watch.observe(*pair) for pair in zip(rows[some], steps[some], strict=True)]

    whole = observe(TroubleWatch(0.05), slice(None))
    kinds = {trouble.kind for _, troubles in whole for trouble in troubles}
    assert kinds == {"gap", "entropy", "equal_rewards", "verifier"}
    for stop in range(len(steps)):
        first, second = TroubleWatch(0.05), TroubleWatch(0.05)
        before = observe(first, slice(0, stop))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + observe(second, slice(stop, None)) == whole
        assert second.active == {} or all(text.startswith("since step ") for text in second.active.values())


def test_what_is_done() -> None:
    gap, verifier = Trouble("gap", "at step 3 a gap"), Trouble("verifier", "at step 3 the same")
    assert what_to_do([], TroubleConfig(verifier="stop"), 0, 3) == ("warn", "")
    assert what_to_do([gap], TroubleConfig(verifier="stop"), 0, 3) == ("warn", "")
    back = TroubleConfig(gap="rollback", verifier="rollback")
    assert what_to_do([gap, verifier], back, 2, 3) == ("rollback", "at step 3 a gap; at step 3 the same")
    action, text = what_to_do([gap], back, 3, 3)
    assert action == "give up" and "the run went back 3 times already" in text
    action, text = what_to_do([gap, verifier], TroubleConfig(gap="rollback", verifier="stop"), 0, 3)
    assert action == "stop" and text == (
        "at step 3 the same. The state is saved; --resume goes on with it until this begins anew, "
        "--resume train.on_trouble.verifier=warn never stops for it again"
    )


def test_it_reaches_the_log_the_metrics_and_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = enter_run(tmp_path / "run", "seed: 0\n", resume=False)[0]
    process = RankProcess(directory, Worker(0, "generator"), reads_file=False)
    journal = Journal(directory, "train", process, total_steps=9, resumed_step=0, writes=True, trackers=())
    watch = TroubleWatch(TrainConfig().max_logprob_gap)
    for step in range(1, 7):
        entry = row(step, **({"logprob_gap/mean_abs": 0.031} if step > 2 else {}))
        found, troubles = watch.observe(entry, None)
        journal.step_done(entry | found)
        journal.troubled([trouble.text for trouble in troubles], watch.active.values())
    text = (
        "engine and trainer of the generator differ by 0.031 in the mean log-probability of a sampled token "
        "(logprob_gap/mean_abs); above 0.05 (train.max_logprob_gap) the run ends"
    )
    assert json.loads(directory.progress.read_text())["notes"] == [f"at step 3 {text}"]
    assert f"at step 3 {text}\n" == capsys.readouterr().out
    assert [(event["event"], event["step"], event["text"]) for event in read_events(directory)] == [
        ("trouble", 3, f"at step 3 {text}")
    ]
    assert f"since step 3 {text}" in states([directory])[0].detail
    # Back to step 2: later rows and their events are gone, what happened is told once, however often it happens.
    for _ in range(2):
        journal.went_back(2, "back from step 6")
        assert [entry["step"] for entry in read_metrics(directory)] == [1, 2]
        assert [(event["event"], event["step"]) for event in read_events(directory)] == [("rollback", 2)]
        journal.step_done(row(3))
    assert [entry["step"] for entry in read_metrics(directory)] == [1, 2, 3]
    assert "since step" not in states([directory])[0].detail


def test_the_limits_of_the_gap() -> None:
    """Others see 0.01 to 0.02 in bf16; fp32 agrees to 1e-5; half a billion parameters gave 0.011."""
    trains = {
        name: yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["train"]
        for name in ("quickstart", "experiments/half_billion/tango")
    }
    assert {name: train.get("max_logprob_gap") for name, train in trains.items()} == {
        "quickstart": 0.01,
        "experiments/half_billion/tango": None,
    }
    assert TrainConfig().max_logprob_gap == 0.05
