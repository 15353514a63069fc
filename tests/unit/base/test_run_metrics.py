"""Metrics and dumps: what is written is what is read, also across a resume and a torn line."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.dumps import ROLLOUT_SCHEMA, RolloutRow, dumped_steps, read_rollouts, write_rollouts
from tango_hpc.base.run.metrics import (
    REQUIRED_KEYS,
    MetricsWriter,
    RowTail,
    read_evaluations,
    read_events,
    read_metrics,
)
from tango_hpc.runner.enter import enter_run

CONTRACT_KEYS = {
    "step", "role", "seconds/total", "seconds/rollout", "seconds/try", "seconds/verify", "seconds/train", "seconds/logprobs",
    "seconds/reshard", "tokens/generated", "tokens/trained", "reshard/bytes_sent", "reshard/bytes_local",
    "reshard/bytes_minimum", "logprob_gap/mean_abs", "generator/accuracy", "verifier/outcome_f1",
    "verifier/correct_share", "verifier/parse_failures", "loss", "grad_norm", "kl", "entropy", "alpha",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path):
    return enter_run(tmp_path / "run", "seed: 0\n", resume=False)[0]


def write_steps(directory, steps, resumed_step=0, stage="train"):
    with MetricsWriter(directory, stage, resumed_step=resumed_step) as metrics:
        for step in steps:
            metrics.write({"step": step, "role": "generator", "loss": float(step)})
            metrics.write_evaluation(step, {"generator/accuracy": step / 100})


def test_every_row_has_the_contract_keys(directory):
    assert set(REQUIRED_KEYS) == CONTRACT_KEYS | {"verifier/outcome_j", "verifier/step_j", "groups_with_signal"} | {
        f"seconds/{phase}" for phase in ("score", "wake", "sleep", "onload", "offload")
    }
    write_steps(directory, [1])
    (row,) = read_metrics(directory)
    assert row.keys() >= CONTRACT_KEYS
    assert row["stage"] == "train" and row["loss"] == 1.0 and row["kl"] is None


def test_nonfinite_values_are_null_and_named(directory):
    with MetricsWriter(directory, "train") as metrics:
        metrics.write({"step": 1, "role": "generator", "loss": math.nan, "grad_norm": math.inf, "kl": 0.5})
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in directory.metrics.read_text().splitlines()]
    assert row["loss"] is None and row["grad_norm"] is None and row["kl"] == 0.5
    assert row["nonfinite"] == ["loss", "grad_norm"]


def test_resumed_file_reads_as_uninterrupted(directory):
    write_steps(directory, [1, 2], stage="sft")
    write_steps(directory, [1, 2, 3, 4, 5])
    with directory.metrics.open("a") as file:
        file.write('{"step": 6, "ro')  # the crash came in the middle of a line
    write_steps(directory, [4, 5, 6], resumed_step=3)
    assert [row["step"] for row in read_metrics(directory, "train")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_evaluations(directory, "train")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_metrics(directory, "sft")] == [1, 2]


def test_evaluation_that_is_repeated_after_an_interruption_replaces_the_first(directory):
    with MetricsWriter(directory, "train") as metrics:
        metrics.write_evaluation(0, {"generator/accuracy": 0.5})
        metrics.write_evaluation(0, {"verifier/eval_loss": 2.0})
    with MetricsWriter(directory, "train") as metrics:
        assert len(read_evaluations(directory)) == 2  # kept: a run that stopped inside step 1 does not repeat it
        metrics.write_evaluation(0, {"generator/accuracy": 0.25})
    assert [row.get("generator/accuracy") for row in read_evaluations(directory)] == [None, 0.25]


def test_rows_that_were_lost_leave_a_marked_gap(directory, capsys):
    write_steps(directory, [1, 2, 3, 4, 5, 6, 7])
    lines = directory.metrics.read_text().splitlines()
    lines[2], lines[3] = lines[2][:40], '{"step": 4}'  # a half line in the middle, and one that is JSON all the same
    directory.metrics.write_text("\n".join(line for i, line in enumerate(lines) if i != 5) + "\n")
    with MetricsWriter(directory, "train", resumed_step=6) as metrics:
        told = [
            "metrics.jsonl has no row of steps 3 to 4: lost, while the weights have them",
            "metrics.jsonl has no row of step 6: lost, while the weights have them",
            "metrics.jsonl had 2 lines that are no rows: damaged, kept in metrics.jsonl.damaged",
        ]
        assert metrics.gaps == told
        metrics.write({"step": 7, "role": "generator"})
    assert f"{directory.metrics}: line 3 is damaged" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(directory)] == [1, 2, 5, 7]
    events = [(row["event"], row.get("first_step"), row["step"], row["text"]) for row in read_events(directory)]
    assert events == [("rows_lost", 3, 4, told[0]), ("rows_lost", 6, 6, told[1]), ("lines_lost", None, 6, told[2])]
    with MetricsWriter(directory, "train", resumed_step=7) as metrics:
        assert metrics.gaps == []  # told before
    write_steps(directory, [4, 5, 6, 7], resumed_step=3)  # from an older checkpoint: some come again
    assert [row.get("first_step") for row in read_events(directory)] == [None, 3]
    assert [row["step"] for row in read_metrics(directory)] == [1, 2, 4, 5, 6, 7]
    directory.metrics.unlink()
    with MetricsWriter(directory, "eval", resumed_step=3) as metrics:  # counts sets, and writes no rows
        assert metrics.gaps == []


def test_rows_that_another_stage_has_lost_leave_a_marked_gap(directory, capsys):
    write_steps(directory, [1, 2, 3], stage="sft")
    (directory.checkpoints / "sft" / "step_000004").mkdir(parents=True)
    lines = directory.metrics.read_text().splitlines(keepends=True)
    directory.metrics.write_text(lines[0] + lines[1][:30] + "\n" + '{"step": 9}\n[1]\n' + lines[2])
    told = [
        "metrics.jsonl has no row of step 2 of sft: lost, while the weights have them",
        "metrics.jsonl has no row of step 4 of sft: lost, while the weights have them",
        "metrics.jsonl had 3 lines that are no rows: damaged, kept in metrics.jsonl.damaged",
    ]
    with MetricsWriter(directory, "train", trackers=()) as metrics:
        assert metrics.gaps == told
    assert f"{directory.metrics}: lines that are no rows, passed over: 1" in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(directory, "sft")] == [1, 3]
    assert [(row["stage"], row["event"], row["step"]) for row in read_events(directory)] == [
        ("sft", "rows_lost", 2), ("sft", "rows_lost", 4), ("train", "lines_lost", 0),
    ]  # fmt: skip
    assert directory.metrics.with_name("metrics.jsonl.damaged").read_text() == lines[1][:30] + '\n{"step": 9}\n[1]\n'
    for stage in ("train", "eval"):
        with MetricsWriter(directory, stage, trackers=()) as metrics:
            assert metrics.gaps == []  # told before
    assert len(read_events(directory)) == 3
    write_steps(directory, [4], resumed_step=3, stage="sft")  # from an older checkpoint: some come again
    assert [(row["stage"], row["event"], row["step"]) for row in read_events(directory)] == [
        ("sft", "rows_lost", 2), ("train", "lines_lost", 0),
    ]  # fmt: skip


def test_a_gap_of_any_length_is_marked_at_once(directory):
    write_steps(directory, [1, 10**6], stage="sft")
    with MetricsWriter(directory, "train", resumed_step=10**6, trackers=()) as metrics:
        assert len(metrics.gaps) == 2
    lost = {row["stage"]: (row["first_step"], row["last_step"]) for row in read_events(directory)}
    assert lost == {"sft": (2, 10**6 - 1), "train": (1, 10**6)}


def test_evaluations_that_were_lost_are_counted_and_kept_aside(directory):
    write_steps(directory, [1, 2, 3])
    lines = directory.evaluations.read_text().splitlines(keepends=True)
    directory.evaluations.write_text(lines[0] + lines[1][:20] + "\n" + lines[2].rstrip("\n"))
    said = []
    with MetricsWriter(directory, "train", resumed_step=3, trackers=(), tell=said.append) as metrics:
        assert metrics.gaps == [
            "evaluations.jsonl had 1 line that is no row: damaged, kept in evaluations.jsonl.damaged"
        ]
        with directory.evaluations.open("a") as file:
            file.write('{"step": 3}\n[1]\n')  # while the stage runs
        metrics.write_evaluation(3, {"generator/accuracy": 0.75})
    assert said == ["evaluations.jsonl had 2 lines that are no rows: damaged, kept in evaluations.jsonl.damaged"]
    assert [row["generator/accuracy"] for row in read_evaluations(directory)] == [0.01, 0.75]
    assert [(row["event"], row["step"], row["lines"]) for row in read_events(directory)] == [
        ("lines_lost", 3, 1), ("lines_lost", 3, 2),
    ]  # fmt: skip
    kept = directory.evaluations.with_name("evaluations.jsonl.damaged").read_text()
    assert kept == lines[1][:20] + '\n{"step": 3}\n[1]\n'
    write_steps(directory, [2, 3], resumed_step=1)
    assert [row["lines"] for row in read_events(directory)] == [1, 2]  # these do not come again


def test_an_event_is_no_step_and_outlives_a_resume(directory):
    write_steps(directory, [1, 2, 3])
    with MetricsWriter(directory, "train", resumed_step=3) as metrics:
        metrics.write_event("checkpoint_set_aside", 3, "it was damaged")
    write_steps(directory, [2, 3], resumed_step=1)
    (event,) = read_events(directory)
    assert (
        event.items()
        >= {
            "stage": "train",
            "step": 3,
            "event": "checkpoint_set_aside",
            "text": "it was damaged",
        }.items()
    )
    assert [row["step"] for row in read_metrics(directory)] == [1, 2, 3]


def test_tensorboard_has_one_value_per_step_after_a_resume(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(directory, [1, 2, 3, 4])
    write_steps(directory, [3, 4, 5], resumed_step=2)
    events = EventAccumulator(str(directory.tensorboard / "train"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, step) for step in range(1, 6)]
    assert "eval/generator/accuracy" in events.Tags()["scalars"]


def test_tail_gives_complete_rows_once_and_notices_a_rewrite(directory):
    tail = RowTail(directory.metrics)
    assert tail.new_rows() == ([], False)
    write_steps(directory, [1, 2])
    with directory.metrics.open("a") as file:
        file.write('{"step": 3, ')
        file.flush()
        rows, rewritten = tail.new_rows()
        assert [row["step"] for row in rows] == [1, 2] and not rewritten
        file.write('"role": "verifier", "stage": "train"}\n')
        file.flush()
    assert tail.new_rows() == ([{"step": 3, "role": "verifier", "stage": "train"}], False)
    write_steps(directory, [2], resumed_step=1)
    rows, rewritten = tail.new_rows()
    assert [row["step"] for row in rows] == [1, 2] and rewritten


def example_row(**changes):
    values = {
        "step": 12, "role": "generator", "group_id": "q7", "response_id": "q7-0", "question": "1+1?",
        "gold_answer": "2", "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "response_text": "<think>…",
        "response_logprobs": [-0.5, -0.25, 0.0], "step_end_tokens": [1], "verification_text": "fine",
        "step_judgements": [-1], "step_labels": [], "final_judgement": 1, "outcome_reward": 1.0, "step_rewards": [-1.0],
        "format_reward": None, "alpha": 0.125, "algorithm": "grpo", "advantages": [0.5, 0.5, 0.25],
    }  # fmt: skip
    return RolloutRow(**(values | changes))


def test_dump_round_trip_has_the_contract_schema(directory):
    rows = [
        example_row(),
        example_row(response_id="q7-1", response_ids=[], response_logprobs=[], advantages=[], response_text=""),
    ]
    path = directory.rollout_file("generator", 12)
    write_rollouts(path, rows)
    assert path.name == "generator_step_000012.parquet"
    assert read_rollouts(path) == rows
    assert pq.read_schema(path).equals(ROLLOUT_SCHEMA)
    assert [entry.name for entry in directory.rollouts.iterdir()] == [path.name]
    assert dumped_steps(directory.rollouts) == {"generator": [12]}


def test_dump_schema_is_the_contract_of_the_design():
    types = {column.name: str(column.type).replace("element: ", "").replace("item: ", "") for column in ROLLOUT_SCHEMA}
    assert types == {
        "step": "int32", "role": "string", "group_id": "string", "response_id": "string", "question_id": "string",
        "question": "string",
        "gold_answer": "string", "source": "string", "metadata": "string", "prompt_ids": "list<int32>", "response_ids": "list<int32>",
        "response_text": "string", "response_logprobs": "list<float>", "step_end_tokens": "list<int32>",
        "solution_text": "string", "solution_correct": "bool", "score": "float", "reward_parts": "string",
        "verification_text": "string",
        "step_judgements": "list<int8>", "step_labels": "list<int8>", "final_judgement": "int8", "outcome_reward": "float",
        "step_rewards": "list<float>", "format_reward": "float", "reward": "float", "class_weight": "float",
        "alpha": "float", "algorithm": "string", "state": "string", "advantages": "list<float>",
    }  # fmt: skip


def test_failed_write_leaves_no_half_dump(directory):
    path = directory.rollout_file("generator", 1)
    with pytest.raises(pa.ArrowInvalid):
        write_rollouts(path, [example_row(step_judgements=[400])])  # does not fit int8
    assert list(directory.rollouts.iterdir()) == []


def test_one_advantage_per_token_is_an_invariant():
    with pytest.raises(AssertionError, match="2 advantages"):
        example_row(advantages=[0.5, 0.5])


def test_reading_something_else_says_what_is_missing(tmp_path):
    other = tmp_path / "questions.parquet"
    pq.write_table(pa.table({"question": ["?"], "step": [1]}), other)
    with pytest.raises(UserError, match=r"is not a rollout dump: it has no column role, group_id"):
        read_rollouts(other)
    with pytest.raises(UserError, match=r"cannot read .* as Parquet"):
        read_rollouts(tmp_path / "missing.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match=r"cannot read .* as Parquet"):
        read_rollouts(tmp_path / "torn.parquet")
