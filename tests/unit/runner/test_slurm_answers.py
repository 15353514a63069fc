"""Three answers of Slurm, not two: what waits or runs, what has gone, and what nobody knows while it is silent."""

from __future__ import annotations

import io
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from tango_hpc.base.errors import UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands import asking, ending
from tango_hpc.commands.asking import Asking
from tango_hpc.commands.ending import cancel, stop
from tango_hpc.commands.handle import RunJob
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.resources import Memory
from tango_hpc.commands.status import run_state, show_logs, states
from tango_hpc.commands.submit import check_nobody_runs, executor
from tango_hpc.commands.sweep import load_sweep
from tango_hpc.commands.sweep_submit import submit_sweep
from tango_hpc.runner import environment, slurm
from tango_hpc.runner.attempts import Attempt, AttemptLog, remember_job
from tango_hpc.runner.enter import prepare_run
from tango_hpc.runner.starters import SrunStarter
from tango_hpc.runner.stop import StopRequest, read_stop_request
from tango_hpc.stages.stage import TRAIN
from tests.helpers.fake_slurm import DOWN, GONE, FakeSlurm, described, said, submitted_run
from tests.slurm.jobs import counting_config, wait_until


def test_three_answers(fake: FakeSlurm) -> None:
    fake.says("scontrol", described("7"))
    found = slurm.show_job("7")
    assert found is not None and found.state == "RUNNING"
    fake.fails("scontrol", GONE)
    assert slurm.show_job("7") is None
    for error in (DOWN, "slurm_load_jobs error: Socket timed out on send/recv operation", ""):
        fake.fails("scontrol", error)
        with pytest.raises(slurm.NoAnswer):
            slurm.show_job("7")
    fake.fails("squeue")
    assert slurm.queue({"7": os.getuid()})["7"][0] == "UNKNOWN"
    fake.says("squeue", "8|RUNNING|None")
    assert slurm.queue({"7": os.getuid(), "8": os.getuid()}) == {"8": ("RUNNING", "None")}


FINAL = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
]
OTHERS = [
    "PENDING",
    "RUNNING",
    "SUSPENDED",
    "COMPLETING",
    "CONFIGURING",
    "EXPEDITING",
    "LAUNCH_FAILED",
    "POWER_UP_NODE",
    "RECONFIG_FAIL",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "REVOKED",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "UPDATE_DB",
    "SOMETHING_NEW",
]


@pytest.mark.parametrize("state", [*FINAL, *OTHERS])
def test_a_job_is_over_in_the_final_states_alone(fake: FakeSlurm, tmp_path: Path, state: str) -> None:
    """Those of squeue's manual (25.05), and one that no manual has."""
    run = submitted_run(tmp_path)
    fake.says("squeue", f"7|{state}|None")
    fake.says("scontrol", described("7", state))
    if state in FINAL:
        assert states([run])[0].is_over
        check_nobody_runs(run)
    else:
        assert states([run])[0].state in ("waiting", "running")
        with pytest.raises(UserError, match=f"job 7 of .* is {state}"):
            check_nobody_runs(run)


BANNER = "*** Note: maintenance on Monday = 8:00, job 12 ends then ***"


def test_components_of_a_heterogeneous_job(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.says("squeue", "7+0|COMPLETING|None\n7+1|COMPLETED|None\n8+0|FAILED|x\n8+1|RUNNING|None")
    assert slurm.queue({"7": os.getuid(), "8": os.getuid()}) == {
        "7": ("COMPLETING", "None"),
        "8": ("RUNNING", "None"),
    }
    fake.says("scontrol", f"{described('7')} HetJobId=7 HetJobOffset=0\n{described('8')} HetJobId=7 HetJobOffset=1")
    found = slurm.show_job("7")
    assert found is not None and found.job_id == "7"
    script = tmp_path / "job.sh"
    fake.says("squeue", f"7+0|{script}\n7+1|{script}\n12_[1-3]|{script}\n9|{script}")
    assert slurm.submitted_from(script) == "12"


def test_lines_before_an_answer_are_passed_over(fake: FakeSlurm, tmp_path: Path) -> None:
    run = submitted_run(tmp_path)
    fake.says("squeue", f"{BANNER}\n7|RUNNING|None")
    assert states([run])[0].state == "running"
    fake.says("scontrol", f"{BANNER}\n{described('7')}")
    found = slurm.show_job("7")
    assert found is not None and (found.job_id, found.state) == ("7", "RUNNING")
    fake.runs(
        "scontrol",
        f"echo {shlex.quote(BANNER)}; [ \"$2\" = config ] && echo 'Configuration data as of 2026-01-31T11:00:00'"
        f" || echo {shlex.quote(described('7'))}",
    )
    assert slurm.seconds_left("7") == 3600
    fake.says("scontrol", BANNER)  # and nothing else: no word of the job, so that it is not known to have gone
    with pytest.raises(slurm.NoAnswer):
        slurm.show_job("7")
    fake.says("sbatch", f"{BANNER}\n43;cluster")
    assert slurm.submit_after("7", tmp_path / "job.sh", os.environ) == "43"
    fake.says("sacct", f"{BANNER}\nCANCELLED by 1000")
    assert slurm.accounting("7") == "CANCELLED"


def test_the_job_of_a_submission_is_the_one_that_sbatch_names(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run", {"nodes": 1})
    made = executor(config, Profile(), Memory(None, ""), tmp_path, "run", "slurm", tmp_path)
    parsed = made._get_job_id_from_submission_command
    assert parsed(f"{BANNER}\nSubmitted batch job 4711\n".encode()) == "4711"
    assert parsed("Submitted batch job 4711 on cluster snow") == "4711"


def test_what_users_set_for_themselves_hides_no_jobs(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "cpu")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    fake.runs("squeue", '[ -z "$SQUEUE_PARTITION" ] && echo "7|RUNNING|None"')
    assert slurm.queue({"7": os.getuid()}) == {"7": ("RUNNING", "None")}
    fake.runs("scontrol", f"[ $SLURM_TIME_FORMAT = standard ] && echo {described('7')!r}")
    found = slurm.show_job("7")
    assert found is not None and found.end_time is not None


def test_a_command_that_hangs_is_no_answer_and_leaves_nothing_behind(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.3)
    fake.runs("scontrol", f"sleep 60 & echo $! >'{tmp_path}/pid'; wait")  # as where the command is a site's script
    started = time.monotonic()
    with pytest.raises(slurm.NoAnswer, match="scontrol did not answer within"):
        slurm.show_job("7")
    assert time.monotonic() - started < 10
    child = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    until = time.monotonic() + 5
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


def test_while_slurm_is_silent_nothing_is_taken_for_gone(fake: FakeSlurm, tmp_path: Path) -> None:
    directory = submitted_run(tmp_path)
    state = states([directory])[0]
    assert state.state == "unknown" and not state.is_over
    assert "Unable to contact slurm controller" in state.detail and "attempt 1, train" in state.detail
    job = RunJob(directory.submitit_logs, "7", directory.path)
    assert not job.done(force_check=True) and job.state == "UNKNOWN"
    with pytest.raises(UserError, match="whether job 7 of .* waits or runs is not known, so nothing was started"):
        check_nobody_runs(directory)
    directory.lock_file.write_text(json.dumps({"host": "n9", "pid": 1, "job": "7"}))
    with pytest.raises(UserError, match="whether a job runs in .* is not known, so nothing was started; try again"):
        check_nobody_runs(directory)
    with pytest.raises(UserError, match="not all could be told to stop"):
        said(lambda console: stop(directory.path, console))
    assert read_stop_request(directory) is not None  # a run that does run needs no Slurm to hear of it
    with pytest.raises(UserError, match="not cancelled; try again:\njob 7 of "):
        said(lambda console: cancel(directory.path, console))
    assert not any(call.startswith("scancel") for call in fake.calls())

    fake.says("squeue", "7|RUNNING|None")
    assert states([directory])[0].state == "running" and not job.done(force_check=True)
    fake.says("squeue", "")
    assert states([directory])[0].state == "lost"


def test_what_a_finished_run_says_needs_no_slurm(fake: FakeSlurm, tmp_path: Path) -> None:
    directory = submitted_run(tmp_path)
    log = AttemptLog(directory)
    log.end(replace(log.read()[0], program=TRAIN), 0, "")
    assert states([directory])[0].state == "done"


def test_an_outage_resubmits_no_cells(fake: FakeSlurm, tmp_path: Path) -> None:
    counting_config(tmp_path, "base", {"nodes": 1})
    file = tmp_path / "sweep.yaml"
    file.write_text(
        yaml.safe_dump({"config": "base.yaml", "dir": str(tmp_path / "out"), "seeds": [0, 1], "cells": [{}]})
    )
    sweep = load_sweep(file)
    for index, cell in enumerate(sweep.cells):
        prepare_run([TRAIN], cell.config, resume=False)
        job = SimpleNamespace(job_id=f"7_{index}", paths=SimpleNamespace(stdout=tmp_path / "none.log"))
        remember_job(cell.directory, "train", "slurm", job, None)
    with pytest.raises(UserError, match="whether 2 of 2 cells wait or run is not known, so nothing was submitted"):
        submit_sweep(sweep, Console(), profile=None, cluster="slurm", resubmit=True)
    assert not any(call.startswith("sbatch") for call in fake.calls())


def test_a_colleagues_run_is_asked_for_under_their_name(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = submitted_run(tmp_path)
    owner = os.getuid()
    reader = 1 if owner != 1 else 2
    monkeypatch.setattr(os, "getuid", lambda: reader)
    fake.runs("squeue", f'[[ ",${{*#*--user=}}," =~ [,\\ ]{owner}[,\\ ] ]] && echo "7|RUNNING|None"; true')
    assert states([directory])[0].state == "running"
    fake.says("squeue", "")
    fake.says("scontrol", "Configuration data as of 2026-01-31T11:00:00\nPrivateData             = jobs,usage")
    state = states([directory])[0]
    assert state.state == "unknown" and "shows nobody the jobs of others" in state.detail
    fake.says("scontrol", "Configuration data as of 2026-01-31T11:00:00\nPrivateData             = none")
    assert states([directory])[0].state == "lost"


def test_a_node_behind_the_login_node_has_started_what_was_submitted(tmp_path: Path) -> None:
    directory = submitted_run(tmp_path)
    log = AttemptLog(directory)
    log.end(replace(log.read()[0], program=TRAIN), 0, "")
    jobs = json.loads(directory.jobs_file.read_text())
    jobs[0]["submitted"] += 5  # the login node's clock is five seconds ahead
    directory.jobs_file.write_text(json.dumps(jobs))
    assert run_state(directory, {}).state == "done"


def test_a_second_job_that_never_started_does_not_hide_the_first(tmp_path: Path) -> None:
    directory = submitted_run(tmp_path)
    job = SimpleNamespace(job_id="8", paths=SimpleNamespace(stdout=tmp_path / "none.log"))
    remember_job(directory, "train", "slurm", job, None)
    state = run_state(directory, {"7": ("RUNNING", "None"), "8": ("FAILED", "NonZeroExitCode")})
    assert (state.state, state.job) == ("running", "7")


def test_a_run_inside_a_notebooks_job_is_not_that_job(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = prepare_run([TRAIN], counting_config(tmp_path, "run", {"nodes": 1}), resume=False)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    log = AttemptLog(directory)
    attempt = log.start(TRAIN)
    assert run_state(directory, {"9": ("RUNNING", "None")}).state == "running"
    fake.says("scontrol", described("9"))
    assert "which is not its own: `tango stop` ends the run alone" in said(
        lambda console: cancel(directory.path, console)
    )
    assert not any(call.startswith("scancel") for call in fake.calls())
    check_nobody_runs(directory)  # the notebook may go on as long as it likes
    log.end(attempt, 0, "")
    assert run_state(directory, {"9": ("RUNNING", "None")}).state == "done"


def test_the_job_of_a_run_is_not_that_of_a_copy_of_its_folder(fake: FakeSlurm, tmp_path: Path) -> None:
    directory = submitted_run(tmp_path, started=False)
    copy = Path(shutil.copytree(directory.path, tmp_path / "a copy"))
    fake.says("squeue", "7|PENDING|None")
    fake.says("scontrol", described("7", "PENDING"))
    fake.runs("scancel", "")
    for end in (cancel, stop):
        assert f"{copy}: a copy of {directory.path}, whose job" in said(lambda console, end=end: end(copy, console))
        assert not any(call.startswith("scancel") for call in fake.calls())
    assert "cancelled job 7" in said(lambda console: cancel(directory.path, console))
    directory.path.rename(tmp_path / "moved")
    assert "cancelled job 7" in said(lambda console: cancel(tmp_path / "moved", console))


def test_a_job_that_was_cancelled_while_it_waited(fake: FakeSlurm, tmp_path: Path) -> None:
    directory = submitted_run(tmp_path, started=False)
    fake.says("squeue", "7|CANCELLED|None")
    shown = said(lambda console: show_logs(directory.path, console, rank=None, lines=5, follow=False))
    assert shown.startswith("no attempt yet, stopped: job 7 was cancelled before the run started; nothing has run")
    # Nothing was computed with its settings, so they may change, with and without --resume.
    changed = counting_config(tmp_path, "run", {"nodes": 1}).model_copy(update={"seed": 5})
    fake.says("scontrol", described("7", "PENDING"))
    with pytest.raises(UserError, match="job 7 of .* is PENDING"):
        prepare_run([TRAIN], changed, resume=False)
    fake.fails("scontrol", GONE)
    prepare_run([TRAIN], changed, resume=False)
    assert "seed: 5" in directory.config.read_text()
    AttemptLog(directory).start(TRAIN)
    with pytest.raises(UserError, match="seed: 5 -> 0"):
        prepare_run([TRAIN], counting_config(tmp_path, "run", {"nodes": 1}), resume=False)


def test_whoever_follows_a_run_asks_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now))
    directory = submitted_run(tmp_path)
    waiting = Asking([directory])
    asked = []
    for _ in range(300):
        if waiting.is_due():
            asked.append(now)
        now += 1
        if now == 1200:
            AttemptLog(directory).end(replace(AttemptLog(directory).read()[0], program=TRAIN), 85, "time")
    assert asked[0] == 1000 and len(asked) < 25
    assert 1200 in asked and max(later - sooner for sooner, later in itertools.pairwise(asked)) <= 20


ASK = "import tango_hpc.runner.slurm as slurm; print(slurm.is_batch_process(), slurm.restarts(), flush=True)"
FAMILY = f"""
import os, subprocess, sys
{ASK}
ask = [sys.executable, "-P", "-c", {ASK!r}]
subprocess.run(ask, check=True)  # a notebook in one of our own jobs
subprocess.run(ask, check=True, env=os.environ | {{"SLURM_JOB_ID": "8"}})  # a job that was submitted from there
os.execve(sys.executable, ask, os.environ)  # as `tango train` becomes the code of the snapshot
"""


def test_only_the_batch_process_of_our_script_takes_the_job_for_its_own() -> None:
    root = Path(__file__).parents[3]
    env = os.environ | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "PYTHONPATH": str(root)}
    batch_script = f"{slurm.BATCH_MARK_LINE}\nexec {shlex.join([sys.executable, '-P', '-c', FAMILY])}"
    done = subprocess.run(["bash", "-c", batch_script], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["True 2", "False 0", "False 0", "True 2"]
    script = (root / "slurm" / "train.sbatch").read_text()
    assert slurm.BATCH_MARK_LINE in script and "\nexec tango " in script
    marked = {"SLURM_JOB_ID": "7", slurm.BATCH_MARK: f"7:{os.getpid()}"}
    assert slurm.is_batch_process(marked) and not slurm.is_batch_process(marked | {"SLURM_STEP_ID": "0"})


def test_ranks_are_ended_though_slurm_hangs(fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("tango_hpc.runner.starters.KILL_SECONDS", 0.5)
    monkeypatch.setattr("tango_hpc.runner.starters.KILL_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr("tango_hpc.runner.starters.LAUNCH_SECONDS", 0.1)
    fake.runs("squeue", "sleep 60")
    fake.runs("srun", "sleep 60")
    directory = submitted_run(tmp_path)
    starter = SrunStarter(directory, TRAIN, counting_config(tmp_path, "run", {"nodes": 1}))
    starter.start()
    started = time.monotonic()
    starter.kill()
    assert not starter.running() and time.monotonic() - started < 20


@pytest.mark.parametrize("fails", [2, 3])
def test_a_step_that_slurm_could_not_launch_is_started_again(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    monkeypatch.setattr("tango_hpc.runner.starters.START_AGAIN_SECONDS", 0.1)
    starts = tmp_path / "starts"
    refusal = "srun: error: Unable to create step for job 7: Socket timed out on send/recv operation"
    fake.runs("srun", f"echo >>{starts}; [ $(wc -l <{starts}) -gt {fails} ] || {{ echo '{refusal}' >&2; exit 1; }}")
    said: list[str] = []
    directory = submitted_run(tmp_path)
    directory.heartbeats.mkdir(exist_ok=True)
    starter = SrunStarter(directory, TRAIN, counting_config(tmp_path, "run", {"nodes": 1}), said.append)
    starter.start()
    while starter.running():
        assert starter.deaths() == []
        time.sleep(0.05)
    assert said == [f"srun has not started the ranks ({refusal}): tried again in 0 s"] * 2
    assert len(starts.read_text().splitlines()) == 3
    assert [death.error for death in starter.deaths()] == (["srun ended with exit code 1"] if fails == 3 else [])


def test_a_step_whose_task_was_there_is_not_started_again(fake: FakeSlurm, tmp_path: Path) -> None:
    directory = submitted_run(tmp_path)
    directory.heartbeats.mkdir(exist_ok=True)
    beat = directory.heartbeat_file(Worker(1, "generator"))
    for how in (
        f"touch {beat}; exit 1",
        f"rm {beat}; echo 'srun: error: n1: task 1: Exited with exit code 1' >&2; exit 1",
    ):
        fake.runs("srun", how)
        starter = SrunStarter(directory, TRAIN, counting_config(tmp_path, "run", {"nodes": 1}))
        starter.start()
        wait_until(lambda starter=starter: bool(starter.deaths()))  # type: ignore[misc]
        assert not starter.running()


def test_the_seconds_that_are_left_are_slurms_own(fake: FakeSlurm) -> None:
    config = "Configuration data as of 2026-01-31T11:59:00"
    answer = f'[ "$2" = config ] && echo "{config}" || echo {described("7")!r}'
    fake.runs("scontrol", answer)
    assert slurm.seconds_left("7") == 60  # wherever this machine's clock stands
    fake.runs("scontrol", answer.replace("2026-01-31T12:00:00", "Unknown"))
    assert slurm.seconds_left("7") is None
    fake.fails("scontrol")
    with pytest.raises(slurm.NoAnswer):
        slurm.seconds_left("7")


def test_a_nodes_address_is_asked_for_again(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def come_back(seconds: float) -> None:
        fake.says("scontrol", "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1")

    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=time.monotonic, sleep=come_back))
    assert environment.node_address("n1") == "10.0.0.1"
    fake.fails("scontrol", "Node n9 not found")
    assert environment.node_address("n9") is None


def test_attempts_of_older_runs_have_own_jobs() -> None:
    assert Attempt(number=1, stage="train", host="n1", job="7", started=0.0, saved_before=None).own_job


def test_what_cannot_be_ended_does_not_keep_the_others_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a folder of a group lie runs of colleagues."""
    for name in ("hers", "mine"):
        prepare_run([TRAIN], counting_config(tmp_path, name, {"nodes": 1}), resume=False)

    def end(directory: RunDirectory, number: int) -> int:
        if directory.path.name == "hers":
            raise PermissionError(1, "Operation not permitted")
        return 77

    def ask(directory: RunDirectory, request: StopRequest) -> None:
        end(directory, 0)

    monkeypatch.setattr(ending, "signal_holder", end)
    monkeypatch.setattr(ending, "request_stop", ask)
    monkeypatch.setattr(ending, "states", lambda directories: [SimpleNamespace(state="running") for _ in directories])
    for command, done in ((cancel, "cancelled process 77"), (stop, "saves at its next safe point and ends")):
        shown = Console(record=True, width=400, file=io.StringIO())
        with pytest.raises(UserError, match="try again:\n.*hers: Operation not permitted$"):
            command(tmp_path, shown)
        assert f"mine: {done}" in shown.export_text()
