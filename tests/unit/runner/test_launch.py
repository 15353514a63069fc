"""The pure parts of launching: profiles, scripts, Slurm's answers, sweeps, places."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tango_hpc.base.config import config_to_yaml, load_config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import note_resumed_from, read_provenance
from tango_hpc.commands import profiles
from tango_hpc.commands.cli import app
from tango_hpc.commands.profiles import Profile, load_profile, setup_lines, time_limit_minutes, variables_here
from tango_hpc.commands.resources import node_memory
from tango_hpc.commands.status import find_runs, run_state, show_logs
from tango_hpc.commands.status_table import show_status
from tango_hpc.commands.submit import PRIVATE_VARIABLES, check_time, executor, script, take_job_files
from tango_hpc.commands.sweep import load_sweep
from tango_hpc.commands.sweep_results import CellResult, group
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, remember_job
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.environment import free_port, own_address, place, prepare_rank, rendezvous_file
from tango_hpc.runner.job import run_attempt
from tango_hpc.runner.lock import RunLock
from tango_hpc.runner.requeue import resume_command
from tango_hpc.runner.snapshot import take_snapshot
from tango_hpc.runner.staging import stage_weights, staged_overrides
from tango_hpc.runner.stop import StopRequest
from tango_hpc.runner.supervisor import ENDED_WHILE_LOADING, Supervisor
from tango_hpc.stages.stage import SFT, STAGES, TRAIN
from tests.helpers.fake_slurm import FakeSlurm, described
from tests.slurm.jobs import counting_config

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = Path(__file__).parents[3] / "slurm" / "profiles"


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_script_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/home/me/my work")
    monkeypatch.setattr("sys.executable", "/home/me/venv/bin/python")
    config = _gpu_config() if name == "gpu" else _config("/scratch/me/runs/one", nodes=2, tasks_per_node=1)
    profile = _full_profile() if name == "gpu" else Profile()
    assert script("train", config, profile) == (GOLDEN / f"submit_{name}.sbatch").read_text()


def _config(run: str, **launch: Any) -> Any:
    from tango_hpc.base.config.schema import Config

    role = {"model": {"path": "/models/a"}}
    return Config.model_validate(
        {
            "run": {"dir": run}, "task": {"name": "math"}, "data": {"train": "/d/t", "eval": "/d/e"},
            "generator": role, "verifier": role, "launch": {"device": "cpu", **launch},
        }
    )  # fmt: skip


def _gpu_config() -> Any:
    return _config("/scratch/me/my runs/two", nodes=4, tasks_per_node=8, device="cuda", grace_seconds=120)


def _full_profile() -> Profile:
    return Profile(
        account="def-me", partition="gpu", qos="long", constraint="a100|h100", exclude="n[3,7]", time="1-12:00:00",
        memory="480G", exclusive=True, cpus_per_rank=8, gpu_request="gres", gpu_type="h100", requeue=False,
        mail_user="me@example.org", mail_type="END,FAIL", sbatch={"switches": 1, "comment": "two words"},
        modules=["python/3.11", "cuda"], venv=Path("$HOME/venvs/tango"), setup=["ulimit -n 65536"],
        env={"NCCL_DEBUG": "WARN"}, cache_dir="$SCRATCH/cache", stage_weights_to="$SLURM_TMPDIR",
        socket_interface="ib0", infiniband_devices="mlx5_0",
    )  # fmt: skip


def test_a_time_limit_within_the_grace_time_is_refused() -> None:
    with pytest.raises(UserError, match="time 2 leaves nothing beside launch.grace_seconds=120"):
        check_time(_gpu_config(), Profile(time="2"))
    check_time(_gpu_config(), Profile(time="5"))


def test_golden_scripts_are_bash() -> None:
    for file in GOLDEN.glob("*.sbatch"):
        subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("1:30", 2),
        ("02:30:00", 150),
        ("1-0", 1440),
        ("1-12:30", 2190),
        ("0-0:0:30", 1),
        ("2-00:00:01", 2881),
    ],
)
def test_time_limits(text: str, minutes: int) -> None:
    assert time_limit_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "0", "1:2:3:4", "-5", "1-"])
def test_wrong_time_limits(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        time_limit_minutes(text)


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_profiles_are_valid_and_so_are_their_commented_keys(file: Path) -> None:
    text = script("train", _gpu_config(), load_profile(str(file)))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    keys = {
        line[2:].partition(":")[0] for line in file.read_text().splitlines() if line.startswith("# ") and ": " in line
    }
    known = {key for key in keys if key.isidentifier() and key.islower()}
    assert known <= set(Profile.model_fields)


def test_all_mistakes_of_a_profile_in_one_message(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("acount: me\ntime: 1 hour\nmemory: much\napptainer: {imag: a.sif}\n")
    with pytest.raises(UserError) as caught:
        load_profile(str(file))
    text = str(caught.value)
    assert "acount: unknown key; did you mean account?" in text
    assert "time: must be minutes, hours:minutes:seconds" in text
    assert "memory: " in text
    assert "apptainer.imag: unknown key; did you mean image?" in text


def test_slurm_gets_what_a_profile_says(tmp_path: Path) -> None:
    """YAML 1.1 reads 1:00:00 as 3600, 010 as 8, 1_000 as 1000, off as false and 2026-01-02 as a date."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "account: 0012\npartition: 010\nqos: 1e3\nreservation: 2026-01-02\nconstraint: off\ntime: 1:00:00\n"
        "memory: 0\nexclusive: true\ncpus_per_rank: 8\nmail_user: null\nenv: {A: 1_000, B: 0x10}\n"
        "sbatch: {nice: 100, begin: 12:30:00, clusters: 007, hold: true}\n"
    )
    profile = load_profile(str(file))
    assert (profile.account, profile.partition, profile.qos, profile.reservation) == (
        "0012",
        "010",
        "1e3",
        "2026-01-02",
    )
    assert (profile.constraint, profile.time, profile.memory, profile.exclusive) == ("off", "1:00:00", "0", True)
    assert (profile.cpus_per_rank, profile.mail_user, profile.env) == (8, None, {"A": "1_000", "B": "0x10"})
    assert profile.sbatch == {"nice": "100", "begin": "12:30:00", "clusters": "007", "hold": True}


def test_a_profile_that_is_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("- account\n")
    with pytest.raises(UserError, match="mine.yaml must hold a mapping of settings, not list"):
        load_profile(str(tmp_path / "mine.yaml"))


def test_profiles_of_the_user_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    mine = tmp_path / "tango_hpc" / "profiles"
    mine.mkdir(parents=True)
    (mine / "generic.yaml").write_text("account: mine\n")
    assert load_profile("generic").account == "mine"
    with pytest.raises(UserError, match="no profile named 'nowhere'; there are: alliance_canada_like, generic"):
        load_profile("nowhere")


def test_a_variable_that_a_node_lacks_ends_the_job(tmp_path: Path) -> None:
    lines = [*setup_lines(Profile(cache_dir="$NO_SUCH/cache"), tmp_path / "none"), "echo never"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env={}, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stdout == "" and "NO_SUCH: unbound variable" in done.stderr


def test_setup_runs_in_bash_and_ends_at_the_first_failure(tmp_path: Path) -> None:
    value = 'a "b" `date` $(date) $5'
    profile = Profile(env={"ODD": value, "PLACE": "$HERE/cache"}, setup=["true"])
    private = take_job_files(profile, tmp_path / "a snapshot") / PRIVATE_VARIABLES
    assert private.stat().st_mode & 0o777 == 0o600
    lines = [*setup_lines(profile, private), 'printf "%s\\n" "$ODD" "$PLACE"']
    assert value not in "".join(lines)
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], env={"HERE": "/x"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{value}\n/x/cache\n"
    lines = [*setup_lines(Profile(setup=["false", "echo never"]), private), "echo nor this"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (78, "tango: failed: false\n")


def test_ranks_in_a_container() -> None:
    profile = Profile.model_validate({"apptainer": {"image": "/i/my image.sif", "options": ["--nv"]}})
    words = shlex.split(profiles.job_variables(profile)["TANGO_RANK_COMMAND"])
    assert words == ["apptainer", "exec", "--nv", "/i/my image.sif", "python", "-P", "-m", "tango_hpc.stages.rank"]


JOB = (
    "JobId=12 ArrayJobId=9 ArrayTaskId=3 JobName=a b JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 "
    "RunTime=00:00:05 EndTime=2026-01-31T12:00:00 Deadline=N/A"
)


def test_what_scontrol_says_of_a_job() -> None:
    job = slurm.parse_job(JOB)
    assert (job.job_id, job.state, job.can_requeue, job.is_alive) == ("9_3", "RUNNING", True, True)
    assert job.end_time == slurm.parse_time("2026-01-31T12:00:00")
    script = Path(__file__)
    assert slurm.parse_job(f"{JOB} Command={script} my config.yaml seed=1 WorkDir=/home/me").script == str(script)
    assert slurm.parse_job(f"{JOB} Command=/no/such script WorkDir=/home/me").script is None
    assert slurm.parse_job(JOB.replace("BatchFlag=1", "BatchFlag=0")).can_requeue is False
    assert slurm.parse_job(JOB.replace("BatchFlag=1", "BatchFlag=3")).can_requeue, "after two launches that failed"
    assert slurm.parse_time("Unknown") is None


@pytest.mark.parametrize(
    ("reason", "cancelled"), [("None", True), ("TimeLimit", False), ("NodeDown", False), ("OutOfMemory", False)]
)
def test_who_ended_a_job_that_is_being_cleared_away(reason: str, cancelled: bool) -> None:
    line = JOB.replace("RUNNING", "COMPLETING").replace("Reason=None", f"Reason={reason}")
    assert slurm.parse_job(line).was_cancelled == cancelled


def test_the_shell_of_an_allocation_is_no_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With LaunchParameters=use_interactive_step salloc's shell is a step of one task."""
    (tmp_path / "srun").touch(mode=0o755)
    salloc = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "PATH": str(tmp_path)}
    assert place(salloc, 2) == "allocation"
    assert place(salloc | {"SLURM_STEP_ID": "0"}, 2) == "alone", "srun --pty bash"
    assert place(salloc | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2) == "rank"


def test_a_job_on_this_machine_has_the_variables_of_its_profile_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(cache_dir="$SCRATCH_HERE/cache", env={"DATA": "${SCRATCH_HERE}/data"})
    monkeypatch.setenv("SCRATCH_HERE", "/scratch/me")
    variables = variables_here(profile)
    assert (variables["HF_HOME"], variables["DATA"]) == ("/scratch/me/cache/huggingface", "/scratch/me/data")
    monkeypatch.delenv("SCRATCH_HERE")
    with pytest.raises(UserError, match=r"\$SCRATCH_HERE, in what the profile gives XDG_CACHE_HOME, is not set here"):
        variables_here(profile)


@pytest.mark.parametrize("visible", [None, "2,3"])
def test_a_run_in_the_background_keeps_the_gpus_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = counting_config(tmp_path, "run", {"nodes": 1})
    made = executor(config, Profile(), node_memory([config], [TRAIN], Profile()), tmp_path, "n", "local", tmp_path)
    words = shlex.split(made._executor.python)
    assert words[:-2] == (["env", "CUDA_VISIBLE_DEVICES=2,3", "setsid"] if visible else ["setsid"])
    assert made._executor.parameters["timeout_min"] > 1e6, "nothing ends it but itself"


def test_what_accounting_says_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.accounting("7") is None
    # Text as documented; the test cluster has no accounting.
    (tmp_path / "sacct").write_text("#!/bin/sh\nprintf 'REQUEUED\\nCANCELLED by 1000\\n'\n")
    (tmp_path / "sacct").chmod(0o755)
    assert slurm.accounting("7") == "CANCELLED"


def test_the_last_task_of_an_array_does_not_call_itself_the_array() -> None:
    env = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}
    assert slurm.job_id(env) == "9_4"


def test_where_a_command_finds_itself() -> None:
    assert place({}, 4) == "alone"
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    assert place(step | {"SLURM_STEP_NUM_TASKS": "1"}, 4) == "alone"
    assert place(step | {"SLURM_STEP_NUM_TASKS": "4"}, 4) == "rank"
    with pytest.raises(UserError, match="has 2 tasks, but launch.nodes \\* launch.tasks_per_node is 4"):
        place(step | {"SLURM_STEP_NUM_TASKS": "2"}, 4)


def test_a_rank_from_slurms_variables(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    env = {
        "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    }  # fmt: skip
    rendezvous_file(directory, env).write_text('{"address": "10.0.0.1", "port": 23456}')
    assert prepare_rank(directory, env) == {
        "RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456",
    }  # fmt: skip
    requeued = env | {"SLURM_RESTART_COUNT": "1"}
    assert rendezvous_file(directory, requeued) != rendezvous_file(directory, env)


def test_where_rank_0_listens() -> None:
    node = {"SLURMD_NODENAME": "localhost"}
    assert own_address(node) == "localhost"
    assert own_address(node | {"GLOO_SOCKET_IFNAME": "lo,eth0"}) == "127.0.0.1"
    assert own_address(node | {"GLOO_SOCKET_IFNAME": "nosuch0", "MASTER_ADDR": "10.0.0.7"}) == "10.0.0.7"
    with pytest.raises(UserError, match="has no network interface nosuch0 with an IPv4 address; up there: "):
        own_address(node | {"GLOO_SOCKET_IFNAME": "nosuch0"})


def test_free_ports_lie_below_those_of_outgoing_connections() -> None:
    assert 20_000 <= free_port() < 32_000


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    with RunLock(directory):
        with pytest.raises(UserError, match=f"process {os.getpid()} on"), RunLock(directory):
            pass
        assert (directory.lock_file).exists()
    assert not (directory.lock_file).exists()


def test_attempts_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    log = AttemptLog(directory)
    log.end(log.start(TRAIN), 85, "time")
    assert log.without_progress(TRAIN, ["7"]) == 1
    log.start(TRAIN)  # its node was lost
    assert log.without_progress(TRAIN, ["7"]) == log.without_progress(TRAIN, ["8", "7"]) == 2
    assert log.without_progress(TRAIN, ["8"]) == log.without_progress(SFT, ["7"]) == 0
    (directory.checkpoints / "train" / "step_000003+rollout").mkdir(parents=True)
    assert log.without_progress(TRAIN, ["7"]) == 0
    attempt = log.start(TRAIN)
    assert attempt.saved_before == "step_000003+rollout"
    log.end(attempt, 1, "boom")
    assert not attempt.made_progress
    assert [attempt.code for attempt in log.read()] == [85, None, 1]


@pytest.mark.parametrize("stage", ["eval", "teacher"])
def test_results_that_an_attempt_left_are_progress(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation and a teacher write no checkpoints: stopped at each time limit, they go on until they are done."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    teacher = {"questions": str(tmp_path / "q.parquet"), "output": str(tmp_path / "out"), "shard": 2, "num_shards": 4}
    directory = RunDirectory(tmp_path / "run")
    directory.control.mkdir(parents=True)
    directory.config.write_text(yaml.safe_dump({"teacher": teacher}))
    parts = directory.path / "eval/model/gsm8k.turns" if stage == "eval" else tmp_path / "out/parts/0002_of_0004"
    other = tmp_path / "out/parts/0001_of_0004"  # of another shard, which says nothing of this one
    other.mkdir(parents=True)
    log = AttemptLog(directory)
    whole = directory.config.read_text()
    directory.config.write_text("teacher: 3\n")
    log.end(log.start(STAGES[stage]), 2, "a config that is refused")
    directory.config.write_text(whole)
    for number in range(3):
        attempt = log.start(STAGES[stage])
        parts.mkdir(parents=True, exist_ok=True)
        (parts / f"{number}.parquet").write_text("x")
        log.end(attempt, 85, "the time limit is near")
        assert attempt.made_progress and log.without_progress(STAGES[stage], ["7"]) == 0
    assert log.read()[-1].saved_after == "3 files of results, 3 bytes"
    for number in range(1, 3):
        attempt = log.start(STAGES[stage])
        (other / f"{number}.parquet").write_text("x")
        log.end(attempt, 1, "boom")
        assert not attempt.made_progress and log.without_progress(STAGES[stage], ["7"]) == number


def test_a_damaged_checkpoint_that_was_set_aside_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    folder, log = directory.checkpoints / "train", AttemptLog(directory)
    for step in (10, 20):
        (folder / f"step_{step:06d}").mkdir(parents=True)
    attempt = log.start(TRAIN)
    (folder / "step_000020").rename(folder / "step_000020.damaged")
    log.end(attempt, 1, "killed before any save")
    assert not attempt.made_progress and not log.read()[-1].made_progress
    assert log.without_progress(TRAIN, ["7"]) == 1  # it went on from what is the newest now
    for name, is_progress in {"step_000010+rollout": True, "step_000011": True}.items():
        attempt = log.start(TRAIN)
        (folder / name).mkdir()
        log.end(attempt, 1, "boom")
        assert attempt.made_progress is is_progress


@pytest.mark.parametrize("provenance", ["whole", "damaged"])
@pytest.mark.parametrize("saves", [False, True])
def test_an_attempt_went_on_from_the_checkpoint_that_its_ranks_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, provenance: str
) -> None:
    """The newest was damaged: what they save may be older than it, and is progress."""
    config = counting_config(tmp_path, "run", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    folder = directory.checkpoints / "train"
    for step in (10, 20):
        (folder / f"step_{step:06d}").mkdir(parents=True)

    def run(supervisor: Supervisor) -> int:
        assert read_provenance(directory)["attempts"][-1]["resumed_from"] == "step_000020"
        (folder / "step_000020").rename(folder / "step_000020.damaged")
        note_resumed_from(directory, "train", "step_000010")
        if provenance == "damaged":
            directory.provenance.write_text('{"attempts": [{"resumed_from": 3}, ')
            note_resumed_from(directory, "train", "step_000010")
        if saves:
            (folder / "step_000015").mkdir()
        supervisor.request, supervisor._ended_while_loading = StopRequest("supervisor", "time"), True
        return 85

    monkeypatch.setattr(Supervisor, "run", run)
    assert run_attempt(directory, TRAIN, config, Console(file=io.StringIO())) == 85
    (attempt,) = AttemptLog(directory).read()
    if provenance == "whole":
        assert read_provenance(directory)["attempts"][-1]["resumed_from"] == "step_000010"
        assert attempt.saved_before == "step_000010" and attempt.made_progress is saves
        assert attempt.reason.endswith(ENDED_WHILE_LOADING) is not saves
    else:  # which is for display: then what is not known is no progress
        assert not attempt.made_progress and attempt.reason.endswith(ENDED_WHILE_LOADING)


def test_only_the_attempt_that_runs_is_said_to_go_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    entries = [{"stage": stage, "resumed_from": "step_000020"} for stage in ("train", "sft")]
    directory.provenance.write_text(json.dumps({"attempts": entries}))
    note_resumed_from(directory, "train", "step_000010")
    note_resumed_from(directory, "sft", "step_000030")
    note_resumed_from(directory, "sft", "step_000020")
    told = [entry["resumed_from"] for entry in read_provenance(directory)["attempts"]]
    assert told == ["step_000020", "step_000020"]
    note_resumed_from(directory, "sft", "step_000019+verify")
    assert read_provenance(directory)["attempts"][-1]["resumed_from"] == "step_000019+verify"
    for wrong in (None, 3, "rubbish", ["step_000020"]):
        directory.provenance.write_text(json.dumps({"attempts": [{"stage": "sft", "resumed_from": wrong}]}))
        note_resumed_from(directory, "sft", "step_000010")
        assert json.loads(directory.provenance.read_text())["attempts"][0]["resumed_from"] == wrong


def test_a_torn_line_of_one_run_does_not_end_the_commands_of_a_folder(tmp_path: Path) -> None:
    for name in ("torn", "whole"):
        directory = prepare_run([TRAIN], counting_config(tmp_path, name, {"nodes": 1}), resume=False)
        log = AttemptLog(directory)
        log.end(log.start(TRAIN), 85, "Ctrl-C")
    torn = RunDirectory(tmp_path / "torn")
    lines = torn.attempts_file.read_bytes().splitlines(keepends=True)
    torn.attempts_file.write_bytes(lines[0] + lines[1] + b"\0\0\xff\n" + lines[0].replace(b": 1", b": 2", 1)[:40])
    told = ""
    for command in (["status"], ["logs"], ["stop"], ["cancel"], ["status", "--json"]):
        done = CliRunner().invoke(app, [command[0], str(tmp_path), *command[1:]])
        assert done.exit_code == 0 and "whole" in done.output, done.output
        told += done.stderr
    named = [line for line in told.splitlines() if re.search(r"attempts\.jsonl\W+line 3 .*passed over", line)]
    assert len(named) == 1 and str(torn.attempts_file) in named[0]  # once, not with every command
    log = AttemptLog(torn)
    assert [attempt.code for attempt in log.read()] == [85]
    again = log.start(TRAIN)  # which writes behind half a line
    log.end(again, 0, "")
    assert [(attempt.number, attempt.code) for attempt in log.read()] == [(1, 85), (2, 0)]
    assert run_state(torn, {}).state == "done"


def test_states_without_slurm(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.control.mkdir()
    assert run_state(directory, {}).state == "new"
    log = AttemptLog(directory)
    attempt = log.start(TRAIN)
    assert run_state(directory, {}).state == "lost"
    with RunLock(directory):
        assert run_state(directory, {}).state == "running"
    log.end(attempt, 85, "Ctrl-C")
    state = run_state(directory, {})
    assert (state.state, state.detail, state.attempts) == ("stopped", "Ctrl-C", 1)


def test_what_is_missing_on_the_compute_node_is_the_reason_that_status_gives(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run [1]", {"nodes": 1})
    directory = prepare_run([TRAIN], config, resume=False)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="lacks tokenizer.json"):
        run_attempt(directory, TRAIN, config, Console(file=io.StringIO()))
    state = run_state(directory, {})
    assert (state.state, state.attempts) == ("failed", 1) and "lacks tokenizer.json" in state.detail
    shown = io.StringIO()
    show_logs(directory.path, Console(file=shown), rank=None, lines=5, follow=True)
    assert shown.getvalue().startswith("the model folder ")
    shown = io.StringIO()
    show_status(tmp_path, Console(file=shown, width=400), as_json=False)
    assert "\nrun [1] train FAILED" in shown.getvalue()


def test_the_command_that_continues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path / "my run")
    directory.control.mkdir(parents=True)
    config = shlex.quote(str(directory.config))
    assert resume_command(directory, "train", env={}) == f"tango train {config} --resume"
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_GPUS_PER_NODE": "a100:4",
    }
    assert resume_command(directory, "train", env=inside) == f"tango train {config} --resume"  # typed into a notebook
    inside[slurm.BATCH_MARK] = f"7:{os.getpid()}"
    options = "--nodes=2 --ntasks-per-node=4 --gpus-per-node=a100:4"
    script = tmp_path / "my own.sbatch"
    script.touch()
    fake = FakeSlurm(tmp_path, monkeypatch)
    fake.says("scontrol", described("7", Command=f"{script} {directory.config} seed=1", WorkDir="/home/me"))
    command = resume_command(directory, "sft", env=inside | {"STAGE": "sft"})
    told = "  # and what else you had given to sbatch, such as --time"
    assert command == f"STAGE=sft sbatch {options} '{script}' {config} --resume{told}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    for number, profile in enumerate(("mycluster", "mine.yaml")):
        job = SimpleNamespace(job_id=str(number), paths=SimpleNamespace(stdout=Path("log")))
        remember_job(directory, "sft,train", "slurm", job, profile)
        name = "mycluster" if profile == "mycluster" else f"{tmp_path}/mine.yaml"
        env = {"SLURM_JOB_ID": str(number), slurm.BATCH_MARK: f"{number}:{os.getpid()}"}
        command = resume_command(directory, "train", env=env)
        assert command == f"tango submit sft,train {config} --resume --profile {name}"


def test_runs_below_a_folder_and_not_below_runs(tmp_path: Path) -> None:
    for name in ("b", "a/deep", "b/checkpoints/copy"):
        (tmp_path / name / "control").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    assert [run.path for run in find_runs(tmp_path)] == [tmp_path / "a" / "deep", tmp_path / "b"]
    with pytest.raises(UserError, match="is no run directory and holds none"):
        find_runs(tmp_path / "c")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_the_test_cluster_says_why_it_cannot_start(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "tools" / "slurm_test_cluster.sh"
    words = ["bash", "-s", "start", "/nowhere"]
    done = subprocess.run(words, user=65534, input=script.read_text(), capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.startswith("no Slurm here: ")


def test_a_snapshot_holds_the_package_where_it_came_from_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "old").touch()
    folder = take_snapshot(tmp_path / "snapshot")
    assert sorted(path.name for path in folder.iterdir()) == ["code_state.json", "tango_hpc"]
    assert (folder / "tango_hpc" / "runner" / "snapshot.py").is_file()
    assert not list(folder.rglob("__pycache__")) and not list(folder.rglob("*.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


def test_weights_are_staged_once_and_read_from_there(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run")
    scratch = tmp_path / "scratch"
    env = {"TANGO_STAGE_WEIGHTS_TO": str(scratch)}
    file = tmp_path / "resolved.yaml"
    file.write_text(config_to_yaml(config))
    assert load_config(file, staged_overrides(file, env)) == config
    (copy,) = stage_weights(config, scratch)
    assert sorted(path.name for path in copy.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert load_config(file, staged_overrides(file, env)).generator.model.path == copy
    assert staged_overrides(file, {}) == []
    assert stage_weights(config, scratch) == [copy]
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    assert load_config(file, staged_overrides(file, env)) == config  # the original has changed


def _sweep_file(folder: Path, **keys: Any) -> Path:
    counting_config(folder, "base")
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({"config": "base.yaml", "dir": str(folder / "sweep")} | keys))
    return file


def test_a_grid_times_seeds(tmp_path: Path) -> None:
    grid = {"algorithm.advantages.generator.name": ["grpo", "rloo"], "generator.optimizer.learning_rate": [1e-5, 2e-5]}
    sweep = load_sweep(_sweep_file(tmp_path, grid=grid, seeds=[3, 5], overrides=["train.generator_steps=9"]))
    assert len(sweep.cells) == 8
    last = sweep.cells[-1]
    assert last.label == "name=rloo, learning_rate=2e-05"
    assert (
        last.config.algorithm.advantages.generator.name == "rloo"
        and last.config.generator.optimizer.learning_rate == 2e-5
    )
    assert last.config.seed == 5 and last.config.train.generator_steps == 9
    assert last.config.run.dir.parent == tmp_path / "sweep" / "cells"
    assert re.fullmatch(r"name=rloo_learning_rate=2e-05_[0-9a-f]{8}_seed=5", last.config.run.dir.name)
    assert len({cell.config.run.dir for cell in sweep.cells}) == 8


def test_every_mistake_of_a_sweep_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_sweep(
            _sweep_file(
                tmp_path,
                cells=[
                    {"algorithm.advantages.generator.nam": "grpo"},
                    {"train.questions_per_step": 0},
                    {"train.eval_every": 1},
                ],
            )
        )
    text = str(caught.value)
    assert "cell 0" in text and "did you mean name?" in text and "cell 1" in text and "cell 2" not in text
    with pytest.raises(UserError, match="either `grid` or `cells`"):
        load_sweep(_sweep_file(tmp_path))
    with pytest.raises(UserError, match="gird: unknown key; did you mean grid"):
        load_sweep(_sweep_file(tmp_path, gird={}))
    with pytest.raises(UserError, match="grid.algorithm.advantages.generator.name: list should have at least 1 item"):
        load_sweep(_sweep_file(tmp_path, grid={"algorithm.advantages.generator.name": []}))


def test_results_best_first_with_the_spread_over_seeds() -> None:
    def cell(index: int, alpha: float, seed: int, state: str, value: float | None) -> CellResult:
        numbers = {} if value is None else {"generator.accuracy_after": value}
        return CellResult(index, {"algorithm.alpha_start": alpha}, seed, "run", state, "", numbers)

    results = [
        cell(0, 0.1, 0, "done", 0.5), cell(1, 0.1, 1, "done", 0.7), cell(2, 0.2, 0, "done", 0.9),
        cell(3, 0.2, 1, "running", 0.1), cell(4, 0.3, 0, "failed", None),
    ]  # fmt: skip
    best, second, none = group(results, "generator.accuracy_after", "max")
    assert (best.label, best.mean, best.spread, best.states) == ("alpha_start=0.2", 0.9, None, ["done", "running"])
    assert second.mean == pytest.approx(0.6) and second.spread == pytest.approx(0.02**0.5)
    assert none.mean is None
    assert group(results, "generator.accuracy_after", "min")[0].label == "alpha_start=0.1"
