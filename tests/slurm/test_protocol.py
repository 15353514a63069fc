"""How a Slurm job ends, requeues itself and goes on, with counting ranks on two real nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from submitit.core.utils import FailedJobError, UncompletedJobError

from tango_hpc.base.run.summary import read_provenance
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands.status import RunState, find_runs, states
from tango_hpc.runner import slurm
from tests.slurm.jobs import (
    PROFILE,
    ROOT,
    TANGO,
    CountingJob,
    counting_config,
    processes_of,
    start_now,
    start_requeued,
    tango,
    tango_command,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with spaces in its path."""
    made = tmp_path_factory.mktemp("shared") / "my runs"
    made.mkdir()
    return made


def counted_on_without_a_gap(job: CountingJob, steps: int) -> None:
    """Every rank did every step once, over however many attempts."""
    for rank in range(job.config.world_size):
        assert job.steps_logged(rank) == list(range(1, steps + 1))


SECRET = "nobody else may know"


@pytest.fixture(scope="module")
def finished(folder: Path, cluster: list[str]) -> CountingJob:
    """A run that came to its end undisturbed."""
    secret = PROFILE.model_copy(update={"env": PROFILE.env | {"HUB_TOKEN": SECRET}})
    job = CountingJob(folder, "plain", steps=3).submit(secret)
    assert job.job.result()["stages"]["train"]["steps"] == 3
    return job


def test_a_job_to_its_end_and_after(finished: CountingJob, folder: Path) -> None:
    job = finished
    assert job.job.result()["stages"]["train"]["status"] == "done"
    counted_on_without_a_gap(job, 3)
    state = job.state()
    assert (state.state, state.attempts, state.job) == ("done", 1, job.job_id)
    # The ranks and the supervisor ran the snapshot, not the checkout.
    assert f"{job.directory.snapshot}/tango_hpc/" in job.directory.log_file(Worker(1, "generator")).read_text()
    code = read_provenance(job.directory)["attempts"][0]["code"]
    assert code["path"] == str(job.directory.snapshot) and code["checksum"] == code["copied_from"]["checksum"]
    # Secrets of the profile's env lie in one file, which its owner alone may read.
    files = [file for file in job.directory.path.rglob("*") if file.is_file()]
    (private,) = (file for file in files if SECRET.encode() in file.read_bytes())
    assert private.stat().st_mode & 0o777 == 0o600 and job.directory.path.stat().st_mode & 0o777 == 0o750
    assert SECRET not in slurm.run_command("scontrol", "write", "batch_script", job.job_id, "-")
    with job.directory.attempts_file.open("a") as file:
        file.write('{"number": 1, "ended": 17')  # torn, as on a full disk
    shown = tango("logs", str(job.directory.path)).stdout
    assert "attempt 1, train" in shown and "rank 0 step 3" in shown
    assert '"state": "done"' in tango("status", str(folder), "--json").stdout


WAYS_TO_GO = {
    "usr2_to_batch": ["scancel", "--batch", "--signal=USR2"],
    "term_to_ranks": ["scancel", "--signal=TERM"],
    "usr2_to_ranks": ["scancel", "--signal=USR2"],
    "requeue": ["scontrol", "requeue"],
    "preempted": ["srun", "--partition=debug", "--nodes=2", "--ntasks-per-node=4", "--input=none", "true"],
}


@dataclass
class Told:
    """A job that was told to go, at a Unix time; its state while it waits, and the last step it will do."""

    job: CountingJob
    at: float = 0.0
    waiting: RunState | None = None
    steps: int = 0


@pytest.fixture(scope="module")
def told(folder: Path, cluster: list[str]) -> dict[str, Told]:
    """Jobs beside each other on both nodes, each told to go in its own way when it has done two steps."""
    jobs = {how: Told(CountingJob(folder, how, steps=4000, step_seconds=0.1)) for how in WAYS_TO_GO}
    for how, leaving in jobs.items():
        partition = "spot" if how == "preempted" else "debug"
        leaving.job.submit(PROFILE.model_copy(update={"partition": partition}))
    for leaving in jobs.values():
        leaving.job.wait_for_step(2)
    # Half of each node's CPUs, while five jobs have one each: the one in `spot` gets SIGTERM, to its ranks alone.
    preempting = subprocess.Popen(WAYS_TO_GO["preempted"])
    jobs["preempted"].at = time.time()
    jobs["preempted"].job.wait_for_attempts(1)
    assert preempting.wait(60) == 0
    for how, leaving in jobs.items():
        if how != "preempted":
            leaving.at = time.time()
            slurm.run_command(*WAYS_TO_GO[how], leaving.job.job_id)
    for leaving in jobs.values():
        leaving.job.wait_for_attempts(1)
        wait_until(lambda leaving=leaving: leaving.job.state().state == "waiting", leaving.job.explain)  # type: ignore[misc]
        leaving.waiting, leaving.steps = leaving.job.state(), leaving.job.end_soon()
    start_requeued(*(leaving.job.job_id for leaving in jobs.values()))
    return jobs


@pytest.mark.parametrize("how", WAYS_TO_GO)
def test_told_to_go_it_saves_requeues_and_continues(told: dict[str, Told], how: str) -> None:
    leaving = told[how]
    first = leaving.job.attempts()[0]
    assert first.code == 85 and first.saved_after is not None
    assert first.ended is not None and first.ended - leaving.at < 60
    assert leaving.waiting is not None and "continues from step_0" in leaving.waiting.detail
    assert leaving.job.wait_for_end().state == "done"
    counted_on_without_a_gap(leaving.job, leaving.steps)
    assert [attempt.code for attempt in leaving.job.attempts()] == [85, 0]
    assert leaving.job.job.result()["stages"]["train"]["status"] == "done"


def test_the_time_limit_where_requeueing_is_off_and_the_command_that_it_names(folder: Path) -> None:
    job = CountingJob(folder, "time limit", {"grace_seconds": 10}, steps=4000, step_seconds=0.1)
    profile = folder / "one minute.yaml"
    # Slurm looks every half a minute and signals that much too early: by default perhaps before the ranks are there.
    one_minute = {"time": "1", "requeue": False, "sbatch": {"signal": "B:USR2@20"}}
    profile.write_text(yaml.safe_dump(one_minute | {"env": PROFILE.env}))
    job.submit(str(profile))
    job.wait_for_step(1)
    left = slurm.seconds_left(job.job_id)
    assert left is not None and 20 < left <= 60
    first = job.wait_for_attempts(1)[0]
    assert first.code == 85 and "the time limit is near" in first.reason and first.saved_after is not None
    assert job.wait_for_end().state == "stopped"
    told = job.supervisor_log().splitlines()
    assert f"Not requeued: job {job.job_id} was not submitted with --requeue." in told
    (command,) = (line.removeprefix("Continue with: tango ") for line in told if line.startswith("Continue with: "))
    steps = job.end_soon()
    tango(*shlex.split(command))
    assert job.wait_for_end().state == "done"
    counted_on_without_a_gap(job, steps)


def test_cancel_and_stop_of_a_folder_save_and_the_jobs_do_not_come_back(folder: Path) -> None:
    jobs = {
        name: CountingJob(folder / group, name, steps=4000, step_seconds=0.1).submit()
        for group, names in (("cancelled", "ab"), ("stopped", "cd"))
        for name in names
    }
    for job in jobs.values():
        job.wait_for_step(2)
    follower = subprocess.Popen(
        [*TANGO, "logs", str(folder / "cancelled"), "--follow"], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert "job " + jobs["a"].job_id in tango("cancel", str(folder / "cancelled")).stdout
    tango("stop", str(folder / "stopped"))
    assert {name: job.wait_for_end().state for name, job in jobs.items()} == dict.fromkeys("abcd", "stopped")
    followed, _ = follower.communicate(timeout=60)
    for name in "ab":
        assert f"===== {jobs[name].directory.path} =====" in followed
    assert followed.count(": stopped after ") >= 2 and "rank 0 step 3" in followed
    for job in jobs.values():
        attempt = job.attempts()[0]
        assert attempt.code == 85 and attempt.saved_after is not None
        assert processes_of(job.job_id) == []
    for name in "cd":  # told to stop, they did as they were told: an `afterok` job may start
        ended = slurm.run_command("scontrol", "show", "job", jobs[name].job_id, "-o")
        assert "JobState=COMPLETED" in ended and "ExitCode=0:0" in ended
        assert "Traceback" not in jobs[name].supervisor_log()
        assert jobs[name].job.result()["stages"]["train"]["status"] == "stopped"
    time.sleep(3)
    assert not any(job.is_in_queue() for job in jobs.values())


@pytest.mark.parametrize("action", ["kill", "fail"])
def test_one_rank_ends_the_job_on_every_node(folder: Path, action: str) -> None:
    job = CountingJob(folder, f"rank {action}", {"tasks_per_node": 2}, rank=3, step=4, action=action).submit()
    job.wait_for_step(4)
    started = time.monotonic()
    state = job.wait_for_end()
    assert time.monotonic() - started < 60
    assert state.state == "failed" and state.detail.startswith("rank 3 (generator) on ")
    first_line = tango("logs", str(job.directory.path)).stdout.splitlines()[0]
    assert first_line.startswith("rank 3 (generator) on ") and "in phase 'rollout'" in first_line
    told = "killed by SIGKILL" if action == "kill" else "ValueError: the loss went for a walk"
    assert told in first_line
    with pytest.raises(FailedJobError, match="failed with exit code 1; see `tango logs"):
        job.job.result()
    assert processes_of(job.job_id) == []


def test_a_failure_after_progress_is_tried_again(folder: Path) -> None:
    job = CountingJob(folder, "retry", steps=8, save_every=2, rank=1, step=5, action="fail", once=True).submit()
    assert job.wait_for_end().state == "done"
    assert [attempt.code for attempt in job.attempts()] == [1, 0]
    assert job.attempts()[1].saved_before == "step_000004"


def test_a_wrong_config_is_not_tried_again(folder: Path) -> None:
    job = CountingJob(folder, "check", steps=8, save_every=2, rank=0, step=5, action="check").submit()
    state = job.wait_for_end()
    assert state.state == "failed" and "no column 'question'" in state.detail
    assert [attempt.code for attempt in job.attempts()] == [78]


def test_a_model_that_compute_nodes_do_not_see(folder: Path) -> None:
    job = CountingJob(folder / "unseen", "run")
    hide = f"rm -r {shlex.quote(f'{folder}/unseen/model')}"  # as the last thing before Python
    job.submit(PROFILE.model_copy(update={"setup": [hide]}))
    state = job.wait_for_end()
    assert state.state == "failed" and f"no model folder at {folder}/unseen/model" in state.detail
    assert [attempt.code for attempt in job.attempts()] == [2]


def test_requeue_stops_without_progress(folder: Path) -> None:
    launch = {"max_attempts_without_progress": 2}
    job = CountingJob(folder, "no progress", launch, steps=4000, step_seconds=0.1, saves=False).submit()
    for number in (1, 2):
        job.wait_for_step(2)
        job.directory.log_file(Worker(0, "generator")).unlink()
        slurm.run_command("scontrol", "requeue", job.job_id)
        job.wait_for_attempts(number)
        wait_until(lambda: job.state().state == "waiting", job.explain)
        if number == 1:
            start_requeued(job.job_id)
    state = job.wait_for_end()
    given_up = f"given up: 2 attempts of job {job.job_id} in a row ended without a new checkpoint"
    assert state.state == "failed" and state.detail.startswith(given_up)
    assert [attempt.code for attempt in job.attempts()] == [85, 85, 1]
    assert tango("logs", str(job.directory.path)).stdout.startswith(given_up)
    assert "Continue with: tango submit train " in job.supervisor_log()


def test_a_job_that_ends_before_python_starts(folder: Path) -> None:
    job = CountingJob(folder, "no module").submit(PROFILE.model_copy(update={"modules": ["python/9.99"]}))
    state = job.wait_for_end()
    assert state.state == "failed" and state.detail == f"job {job.job_id} ended before the run started: FAILED"
    assert "tango: failed: module load python/9.99" in tango("logs", str(job.directory.path)).stdout
    assert job.attempts() == []
    with pytest.raises(UncompletedJobError):
        job.job.result()


def test_a_hang_is_named(folder: Path) -> None:
    launch = {"hang_timeout_seconds": 12, "grace_seconds": 5}
    job = CountingJob(folder, "hang", launch, rank=1, step=2, action="hang", gloo=True).submit()
    state = job.wait_for_end()
    assert state.state == "failed" and "in phase 'rollout': hangs: no progress for" in state.detail
    assert state.detail.startswith("rank 1 (generator) on ")


def test_a_node_goes_down(folder: Path) -> None:
    job = CountingJob(folder, "node down", steps=4000, step_seconds=0.1, save_every=5).submit()
    job.wait_for_step(6)
    try:
        slurm.run_command("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        wait_until(lambda: slurm.show_job(job.job_id).state in ("PENDING", "COMPLETING"), job.explain)  # type: ignore[union-attr]
    finally:
        slurm.run_command("scontrol", "update", "nodename=n2", "state=resume", check=False)
    steps = job.end_soon()
    assert job.wait_for_end().state == "done"
    assert job.steps_logged()[-1] == steps
    first, second = job.attempts()
    assert first.saved_before is None and second.saved_before is not None and second.code == 0


def test_two_jobs_on_one_node_at_once(folder: Path) -> None:
    launch = {"nodes": 1, "tasks_per_node": 2}
    profile = PROFILE.model_copy(update={"sbatch": {"nodelist": "n1"}})
    jobs = [CountingJob(folder, f"twin {name}", launch, steps=4000).submit(profile) for name in "ab"]
    for job in jobs:
        job.wait_for_step(2)
    assert [job.state().state for job in jobs] == ["running", "running"]
    for job in jobs:
        slurm.run_command("scancel", "--batch", "--signal=USR2", job.job_id)
        job.wait_for_attempts(1)
    steps = [job.end_soon() for job in jobs]
    assert [job.wait_for_end().state for job in jobs] == ["done", "done"]
    for job, count in zip(jobs, steps, strict=True):
        counted_on_without_a_gap(job, count)


def test_plain_sbatch_and_srun(folder: Path) -> None:
    env = os.environ | PROFILE.env | {"PATH": f"{tango_command(folder).parent}:{os.environ['PATH']}"}
    job = CountingJob(folder, "by sbatch", steps=4000)
    words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={folder}/plain-%j.log"]
    script = [str(ROOT / "slurm" / "train.sbatch"), str(folder / "by sbatch.yaml")]
    done = subprocess.run([*words, *script], env=env, capture_output=True, text=True, check=True)
    job.job_id = done.stdout.strip()
    job.wait_for_step(2)
    (folder / "by sbatch.yaml").write_text("run: {dir: " + f"'{folder}/by sbatch'" + "}\nnow: wrong\n")
    slurm.run_command("scancel", "--batch", "--signal=USR2", job.job_id)
    job.wait_for_attempts(1)
    start_now(job.job_id)
    wait_until(lambda: len(job.attempts()) == 2, job.explain)
    job.wait_for_step(max(job.steps_logged()) + 1)
    tango("stop", str(job.directory.path))
    assert job.wait_for_end().state == "stopped"
    log = Path(f"{folder}/plain-{job.job_id}.log").read_text()
    assert "Traceback" not in log and log.splitlines()[-1].startswith("Continue with: sbatch --nodes=2 ")
    assert "ExitCode=0:0" in slurm.run_command("scontrol", "show", "job", job.job_id, "-o")
    steps = job.end_soon()
    command = log.splitlines()[-1].removeprefix("Continue with: ")
    done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=True)
    job.job_id = done.stdout.split()[-1]
    wait_until(lambda: len(job.attempts()) == 3, job.explain)
    assert job.wait_for_end().state == "done"
    counted_on_without_a_gap(job, steps)
    assert [attempt.code for attempt in job.attempts()] == [85, 85, 0]


def test_a_run_inside_another_batch_job_leaves_that_job_alone(folder: Path) -> None:
    job = CountingJob(folder, "in a notebook", steps=9, save_every=2, rank=1, step=5, action="fail")
    after = folder / "the notebook goes on"
    words = shlex.join([*TANGO, "train", str(folder / "in a notebook.yaml")])
    notebook = [
        "sbatch",
        "--parsable",
        "--requeue",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--output={folder}/notebook.log",
    ]
    wrapped = f"--wrap={words}; touch {shlex.quote(str(after))}; sleep 60"
    done = subprocess.run(
        [*notebook, wrapped], env=os.environ | PROFILE.env, capture_output=True, text=True, check=True
    )
    other = done.stdout.strip()
    first = job.wait_for_attempts(1)[0]
    assert first.code == 1 and first.made_progress  # which a job of its own would be requeued for
    wait_until(after.exists, job.explain)
    found = slurm.show_job(other)
    assert found is not None and found.state == "RUNNING"
    assert job.state().state == "failed"
    assert f"Not requeued: job {other} is not this run's own" in (folder / "notebook.log").read_text()
    assert "nothing runs or waits" in tango("cancel", str(job.directory.path)).stdout
    slurm.run_command("scancel", other)


def test_inside_a_step_the_command_is_the_rank(folder: Path) -> None:
    job = CountingJob(folder, "by srun", steps=3)
    env = os.environ | PROFILE.env
    words = [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        *TANGO,
        "train",
        str(folder / "by srun.yaml"),
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 step 3" in done.stdout
    assert job.state().state == "done"
    wrong = subprocess.run([*words, "launch.tasks_per_node=2"], env=env, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "this srun step has 2 tasks" in wrong.stderr


def test_submitted_from_an_interactive_step(folder: Path) -> None:
    job, plain = CountingJob(folder, "from a step", steps=3), CountingJob(folder, "plain from a step", steps=3)
    (folder / "step profile.yaml").write_text(yaml.safe_dump({"time": "10", "env": PROFILE.env}))
    # From another folder, with relative paths.
    submit = [*TANGO, "submit", "train", "from a step.yaml", "run.dir=from a step", "--profile", "step profile.yaml"]
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={folder}/plain-%j.log"]
    sbatch += [str(ROOT / "slurm" / "train.sbatch"), str(folder / "plain from a step.yaml")]
    both = f"{shlex.join(submit)} && {shlex.join(sbatch)}"
    # Beside one step's variables, a request for memory that contradicts the new job's own.
    words = ["srun", "--ntasks=1", "env", "SLURM_MEM_PER_CPU=100", "SLURM_RESTART_COUNT=1", "bash", "-c", both]
    env = os.environ | PROFILE.env | {"PATH": f"{tango_command(folder).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"dir: {folder}/from a step" in job.directory.config.read_text()
    job.job_id, plain.job_id = job.state().job or "", done.stdout.split()[-1]
    for started in (job, plain):
        wait_until(lambda started=started: len(started.attempts()) > 0, started.explain)  # type: ignore[misc]
        assert started.wait_for_end().state == "done"
        counted_on_without_a_gap(started, 3)


def test_what_cannot_be_submitted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting_config(folder, "refused")
    file = str(folder / "refused.yaml")
    blocked = tmp_path / "file"
    blocked.touch()
    refused = tango("submit", "train", file, f"run.dir={blocked}/run", check=False)
    assert refused.returncode == 2 and "cannot write the run directory" in refused.stderr
    refused = tango("submit", "train", file, f"generator.model.path={tmp_path}/none", check=False)
    assert refused.returncode == 2 and "no model folder at" in refused.stderr
    (tmp_path / "odd.yaml").write_text("acount: me\ntime: 3\nmemry: 1G\n")
    refused = tango("submit", "train", file, "--profile", str(tmp_path / "odd.yaml"), check=False)
    assert refused.returncode == 2 and not (folder / "refused").exists()
    assert "acount: unknown key; did you mean account?" in refused.stderr
    assert "memry: unknown key; did you mean memory?" in refused.stderr
    (tmp_path / "impossible.yaml").write_text("partition: nowhere\n")
    refused = tango("submit", "train", file, "--profile", str(tmp_path / "impossible.yaml"), check=False)
    assert refused.returncode == 2 and refused.stderr.lower().count("invalid partition specified") == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = tango("submit", "train", file, check=False)
    assert refused.returncode == 2 and "sbatch was not found" in refused.stderr


def test_a_run_is_submitted_once(folder: Path) -> None:
    job = CountingJob(folder, "twice", steps=4000).submit()
    refused = tango("submit", "train", str(folder / "twice.yaml"), "--resume", check=False)
    assert refused.returncode == 2 and f"job {job.job_id}" in refused.stderr
    job.wait_for_step(1)
    refused = tango("train", str(folder / "twice.yaml"), "--resume", "launch.nodes=1", check=False)
    assert refused.returncode == 2 and f"Slurm job {job.job_id}" in refused.stderr
    tango("cancel", str(job.directory.path))
    job.wait_for_end()
    assert states(find_runs(folder / "twice"))[0].state == "stopped"


def test_the_doctor_in_an_allocation_and_on_a_login_node(folder: Path) -> None:
    counting_config(folder, "examined")
    profile = folder / "examined profile.yaml"
    profile.write_text(
        yaml.safe_dump({"cache_dir": str(folder / "cache"), "stage_weights_to": str(folder / "scratch")})
    )
    words = [*TANGO, "doctor", str(folder / "examined.yaml"), "--profile", str(profile)]
    words = ["salloc", "--nodes=2", "--ntasks-per-node=2", *words, "launch.tasks_per_node=2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Gloo all-reduce of 64 MB between two ranks of a node: at most " in done.stdout
    assert "Gloo all-reduce of 64 MB over 4 ranks on n1, n2" in done.stdout
    assert "train: models and data are there" in done.stdout
    assert "clocks agree within" in done.stdout
    assert f"n2: scratch {folder / 'scratch'} has " in done.stdout
    assert "Slurm would take the job: sbatch: Job " in done.stdout

    words = ["salloc", "--nodes=2", *TANGO, "doctor", str(folder / "examined.yaml"), "launch.tasks_per_node=4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert "FAIL this allocation has 2 node(s) of 1 task(s); the config wants launch.nodes=2 of " in done.stdout
    assert done.stdout.rstrip().endswith("1 thing(s) to mend."), done.stdout

    profile.write_text(yaml.safe_dump({"partition": "nowhere", "venv": "/no/venv", "cache_dir": "$NO_SUCH/cache"}))
    missing = f"data.train={folder}/none.parquet"
    done = tango("doctor", str(folder / "examined.yaml"), missing, "--profile", str(profile), check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    for wrong in (
        "FAIL train: no data set at ",
        "FAIL venv: /no/venv/bin/activate is not there",
        "note cache_dir: $NO_SUCH/cache is not set here",
        "FAIL Slurm refuses: ",
        "3 thing(s) to mend.",
    ):
        assert wrong in done.stdout, done.stdout


def test_what_slurm_has_forgotten_is_still_known(finished: CountingJob) -> None:
    # MinJobAge of the test cluster is 20 s, and Slurm looks once a minute; most of that has passed by now.
    wait_until(lambda: slurm.show_job(finished.job_id) is None, finished.explain)
    path = str(finished.directory.path)
    assert finished.state().state == "done" and finished.state().job_state is None
    assert "COMPLETED" in tango("status", path).stdout
    assert ": done after " in tango("logs", path, "--follow").stdout
    assert "nothing runs or waits" in tango("cancel", path).stdout
    assert finished.job.done() and finished.job.state == "DONE"
