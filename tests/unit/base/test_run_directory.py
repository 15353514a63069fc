"""Starting in a directory: new, taken, resumed, shared by stages, unwritable."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tango_hpc.base.errors import UserError
from tango_hpc.base.files import parquet_writer, write_parquet
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.metrics import MetricsWriter
from tango_hpc.base.run.step_names import steps_in
from tango_hpc.base.run.summary import before_and_after, read_provenance, read_summary, update_summary
from tango_hpc.runner.continuity import CHANGEABLE_ON_RESUME
from tango_hpc.runner.enter import config_changes, enter_run
from tango_hpc.runner.provenance import code_state, environment, note_changes, record_attempt
from tests.helpers.runs import small_config

CONFIG = "seed: 0\nrun: {dir: here}\ntrain: {generator_steps: 20, rollouts_per_question: 5}\n"


def test_new_directory_gets_config_and_folders(tmp_path):
    path = tmp_path / "a run with spaces" / "deep"
    directory, changes = enter_run(path, CONFIG, resume=False, stage="train")
    assert changes == []
    assert directory.config.read_text() == CONFIG
    names = {entry.name for entry in path.iterdir()}
    assert names >= {"config.yaml", "tensorboard", "rollouts", "checkpoints", "logs", "control", "heartbeat"}
    assert not [name for name in names if name.startswith(".writable")]
    assert RunDirectory.open(path).path == path


def test_second_run_in_the_same_directory_is_refused(tmp_path):
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False, stage="train")
    update_summary(directory, "train", "running", begins=True)
    with pytest.raises(UserError, match=r"already holds a run.*--resume.*run\.dir=PATH"):
        enter_run(directory.path, CONFIG, resume=False, stage="train")


def test_next_stage_of_the_same_config_shares_the_directory(tmp_path):
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False, stage="sft")
    update_summary(directory, "sft", "done", steps=10)
    enter_run(directory.path, CONFIG, resume=False, stage="train")
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        enter_run(directory.path, CONFIG.replace("seed: 0", "seed: 1"), resume=False, stage="train")


def test_resume_takes_more_steps_and_names_what_it_refuses(tmp_path):
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False)
    longer = CONFIG.replace("generator_steps: 20", "generator_steps: 40")
    _, changes = enter_run(directory.path, longer, resume=True)
    assert [str(change) for change in changes] == ["train.generator_steps: 20 -> 40"]
    assert directory.config.read_text() == longer
    record_attempt(directory, stage="train")
    assert read_provenance(directory)["attempts"][-1]["config_changes"] == ["train.generator_steps: 20 -> 40"]
    other = longer.replace("rollouts_per_question: 5", "rollouts_per_question: 8").replace("seed: 0", "seed: 3")
    with pytest.raises(UserError) as refusal:
        enter_run(directory.path, other, resume=True)
    assert "seed: 0 -> 3" in str(refusal.value) and "train.rollouts_per_question: 5 -> 8" in str(refusal.value)
    assert directory.config.read_text() == longer


def test_what_a_resumed_run_may_change_are_settings_that_there_are(tmp_path):
    def keys(tree, prefix=""):
        for name, value in tree.items():
            yield from keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]

    there = list(keys(small_config(tmp_path).model_dump()))
    assert [pattern for pattern in CHANGEABLE_ON_RESUME if not fnmatch.filter(there, pattern)] == []
    for role in ("generator", "verifier"):
        assert any(fnmatch.fnmatchcase(f"{role}.rollout.kv_cache_gb", pattern) for pattern in CHANGEABLE_ON_RESUME)


def test_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear reader")
    with pytest.raises(UserError, match=r"not empty and is not a run.*thesis\.tex"):
        enter_run(tmp_path, CONFIG, resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_folders_made_by_the_launcher_do_not_count(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    enter_run(tmp_path / "run", CONFIG, resume=False)


def test_unwritable_place_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the run directory .*Not a directory.*run\.dir=PATH"):
        enter_run(tmp_path / "file" / "run", CONFIG, resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_a_clear_error(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="Permission denied"):
        enter_run(tmp_path / "locked" / "run", CONFIG, resume=False)


def test_open_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        RunDirectory.open(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        RunDirectory.open(tmp_path / "nowhere")


def test_config_changes_see_added_and_removed_keys():
    changes = config_changes({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}})
    assert [(change.key, change.before, change.after) for change in changes] == [("a.c", 2, None), ("a.d", None, 3)]


def test_summary_adds_attempts_up_and_keeps_before_values(tmp_path):
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False)
    update_summary(directory, "train", "running", begins=True, results={"generator.accuracy_before": 0.125})
    update_summary(directory, "train", "stopped", steps=3, attempt_seconds=10.0)
    update_summary(directory, "train", "running", begins=True)
    update_summary(
        directory, "train", "done", steps=9, attempt_seconds=5.5, tokens_per_second=100.0,
        results={"generator.accuracy_after": 0.75, "verifier.outcome_f1_after": float("nan")},
    )  # fmt: skip
    summary = read_summary(directory)
    assert summary["stages"] == {"train": {"status": "done", "steps": 9, "wall_seconds": 15.5, "attempts": 2}}
    assert summary["status"] == "done" and summary["wall_seconds"] == 15.5 and summary["tokens_per_second"] == 100.0
    assert summary["generator"] == {"accuracy_before": 0.125, "accuracy_after": 0.75}
    assert summary["verifier"] == {"outcome_f1_after": None}
    assert summary["versions"]["python"]
    assert before_and_after(summary) == [("generator: greedy accuracy", 0.125, 0.75)]


@pytest.mark.parametrize("lost", ["emptied", "deleted", "results", "other kinds"])
def test_what_a_summary_has_lost_comes_back_from_the_rows(tmp_path, lost):
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False)
    update_summary(directory, "train", "running", begins=True)
    with MetricsWriter(directory, "train", trackers=()) as metrics:
        for step, accuracy in ((0, 0.125), (2, 0.5), (4, 0.75)):
            metrics.write_evaluation(step, {"generator/accuracy": accuracy, "verifier/outcome_f1": accuracy / 2})
            when = "after" if step else "before"
            update_summary(directory, "train", "running", results={f"generator.accuracy_{when}": accuracy, f"verifier.outcome_f1_{when}": accuracy / 2})  # fmt: skip
        for step in range(1, 5):
            metrics.write({"step": step, "role": "generator", "seconds/total": 2.5, "tokens/generated": 200})
        metrics.write({"step": 5, "role": "verifier", "seconds/total": math.nan})
    whole = update_summary(directory, "train", "done", steps=5, attempt_seconds=12.0, tokens_per_second=80.0)
    assert whole["generator"] == {"accuracy_before": 0.125, "accuracy_after": 0.75} and whole["wall_seconds"] == 12.0
    if lost == "emptied":
        directory.summary.write_text("")
    elif lost == "deleted":
        directory.summary.unlink()
    elif lost == "results":
        directory.summary.write_text(json.dumps({"status": "done", "stages": whole["stages"]}))
    else:
        wrong = {"generator": {"accuracy_after": "x"}, "verifier": 5, "tokens_per_second": [], "wall_seconds": {}}
        directory.summary.write_text(json.dumps(whole | wrong))
    again = update_summary(directory, "train", "running", begins=True, steps=5)
    assert {name: again[name] for name in ("generator", "verifier", "tokens_per_second")} == {
        name: whole[name] for name in ("generator", "verifier", "tokens_per_second")
    }
    steps_alone = lost in ("emptied", "deleted")
    assert again["wall_seconds"] == again["stages"]["train"]["wall_seconds"] == (10.0 if steps_alone else 12.0)
    assert update_summary(directory, "train", "done", steps=5, attempt_seconds=1.0)["wall_seconds"] == (
        11.0 if steps_alone else 13.0
    )


def test_time_that_is_not_lost_counts_once(tmp_path):
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False)
    with MetricsWriter(directory, "train", trackers=()) as metrics:
        update_summary(directory, "train", "running", begins=True)
        metrics.write({"step": 1, "role": "generator", "seconds/total": 2.5})
        directory.summary.unlink()
        update_summary(directory, "train", "running", steps=1)
        assert update_summary(directory, "train", "stopped", steps=1, attempt_seconds=3.0)["wall_seconds"] == 3.0


@pytest.mark.parametrize("stages", [{"train": "3.11"}, {"train": [1]}, {}, [], "train", None])
def test_stages_that_are_none_are_passed_over(tmp_path, stages):
    run = RunDirectory(tmp_path)
    run.summary.write_text(json.dumps({"status": "running", "stages": stages}))
    assert not read_summary(run).get("stages")
    assert update_summary(run, "train", "running", begins=True)["stages"]["train"]["attempts"] == 1


def test_provenance_keeps_every_attempt_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    directory, _ = enter_run(tmp_path / "run", CONFIG, resume=False)
    record_attempt(directory, stage="sft", command=["tango", "sft", "--api-key=verysecret"])
    note_changes(directory, map(str, config_changes({"a": 1}, {"a": 2})))
    record_attempt(directory, stage="train")
    record_attempt(directory, stage="train")
    text = directory.provenance.read_text()
    attempts = json.loads(text)["attempts"]
    assert "verysecret" not in text
    assert [attempt["stage"] for attempt in attempts] == ["sft", "train", "train"]
    assert attempts[0]["environment"]["SLURM_JOB_ID"] == "4711"
    assert attempts[0]["command"] == ["tango", "sft", "--api-key=***"]
    assert [attempt["config_changes"] for attempt in attempts] == [[], ["a: 1 -> 2"], []]
    assert environment({"AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "1"}) == {"OMP_NUM_THREADS": "1"}


def test_code_state_has_commit_and_diff_of_its_own_checkout_only(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "first")
    (tmp_path / "a.py").write_text("x = 2\n")
    state = code_state(tmp_path)
    assert len(state["commit"]) == 40 and "+x = 2" in state["diff"] and state["changed"] == [" M a.py"]
    snapshot = tmp_path / "runs" / "snapshot"
    snapshot.mkdir(parents=True)
    assert code_state(snapshot) == {"path": str(snapshot)}
    (snapshot / "code_state.json").write_text('{"commit": "abc"}')
    assert code_state(snapshot)["copied_from"] == {"commit": "abc"}


def test_steps_are_ordered_by_number_and_phase_and_strangers_are_left_out(tmp_path):
    names = ["step_1000000", "step_000002+verify", "step_000010", "step_000002", "step_000002+rollout"]
    names += ["step_000002+rollout_10", "step_000002+verify_2", "step_000002+rollout_2"]  # of further draws
    for name in [*names, ".step_000011", "step_3", "step_000004+lunch", "step_000004+_2", "notes.txt"]:
        (tmp_path / name).touch()
    assert [str(name) for name, _ in steps_in(tmp_path)] == [
        "step_000002", "step_000002+rollout", "step_000002+verify", "step_000002+rollout_2", "step_000002+verify_2",
        "step_000002+rollout_10", "step_000010", "step_1000000",
    ]  # fmt: skip
    assert steps_in(tmp_path / "nowhere") == []


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "new" / "a.parquet"
    write_parquet(path, pa.table({"a": [1]}))
    with pytest.raises(RuntimeError, match="boom"), parquet_writer(path, pa.schema([("a", pa.int64())])) as writer:
        writer.write_table(pa.table({"a": [2]}))
        raise RuntimeError("boom")
    assert pq.read_table(path).to_pydict() == {"a": [1]}
    assert [entry.name for entry in path.parent.iterdir()] == ["a.parquet"]


def test_reading_a_run_loads_neither_torch_nor_vllm():
    modules = "directory, dumps, metrics, progress, step_names, summary"
    code = f"import sys; from tango_hpc.base.run import {modules}; from tango_hpc.runner import provenance; "
    code += "print({'torch', 'vllm', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
