"""`requeue: chain`: jobs that continue each other where Slurm may start none again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import submitted_jobs
from tango_hpc.runner.lock import holder_of
from tests.slurm.jobs import PROFILE, CountingJob, processes_of, tango, wait_until

pytestmark = pytest.mark.usefixtures("cluster")
CHAIN = PROFILE.model_copy(update={"requeue": "chain"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with spaces in its path, and a profile for the command line."""
    made = tmp_path_factory.mktemp("shared") / "my chains"
    made.mkdir()
    (made / "profile.yaml").write_text(yaml.safe_dump({"time": "10", "requeue": "chain", "env": PROFILE.env}))
    return made


def jobs_of(job: CountingJob) -> list[str]:
    return [entry["job"] for entry in submitted_jobs(job.directory)]


def wait_for_jobs(job: CountingJob, count: int) -> str:
    """Until the run has so many jobs, the last of which waits for the one before; that one."""
    wait_until(lambda: len(jobs_of(job)) >= count, job.explain)
    before, last = jobs_of(job)[-2:]
    text = slurm.run_command("scontrol", "show", "job", last, "-o")
    for told in ("JobState=PENDING", f"Dependency=afterany:{before}(unfulfilled)", "Requeue=0"):
        assert told in text, f"{text}\n{job.explain()}"
    return last


def wait_for_attempt(job: CountingJob, number: int) -> None:
    """Until that attempt counts."""
    wait_until(lambda: len(job.attempts()) >= number, job.explain)
    done = max(job.steps_logged(), default=0)
    job.wait_for_step(done + 2)


def test_a_chain_goes_on_after_signal_preemption_and_death_and_ends_with_its_run(folder: Path) -> None:
    job = CountingJob(folder, "chained", steps=4000, save_every=5)
    job.submit(CHAIN.model_copy(update={"partition": "ending", "exclusive": True}))
    job.wait_for_step(6)
    second = wait_for_jobs(job, 2)
    state = job.state()
    assert (state.state, state.job, state.stage) == ("running", job.job_id, "train")
    refused = tango("submit", "train", str(folder / "chained.yaml"), "--resume", check=False)
    assert refused.returncode == 2 and "`tango cancel" in refused.stderr

    slurm.run_command("scancel", "--batch", "--signal=USR2", job.job_id)  # as before the time limit
    wait_for_attempt(job, 2)
    ended = slurm.run_command("scontrol", "show", "job", job.job_id, "-o")
    assert "JobState=COMPLETED" in ended and "ExitCode=0:0" in ended
    assert (
        f"Job {second} continues from the last checkpoint" in Path(submitted_jobs(job.directory)[0]["log"]).read_text()
    )
    third = wait_for_jobs(job, 3)
    assert not job.job.done()

    # Slurm ends it at once, and tells of that as it tells of `scancel`: by SIGTERM, and a job that is COMPLETING.
    slurm.run_command("srun", "--partition=debug", "--nodes=2", "--exclusive", "true")
    wait_for_attempt(job, 3)
    fourth = wait_for_jobs(job, 4)

    holder = holder_of(job.directory)  # whose death nothing can be done about
    assert holder is not None and holder.job == third
    steps = max(job.steps_logged()) + 80
    job.behave(steps=steps)
    os.kill(holder.pid, signal.SIGKILL)
    fifth = wait_for_jobs(job, 5)
    wait_until(lambda: job.state().state == "done", job.explain)
    attempts = job.attempts()
    assert [(attempt.job, attempt.code) for attempt in attempts] == [
        (job.job_id, 85), (second, 85), (third, None), (fourth, 0)
    ]  # fmt: skip
    assert [after.saved_before for after in attempts[1:3]] == [before.saved_after for before in attempts[:2]]
    assert job.steps_logged()[-1] == steps
    wait_until(lambda: slurm.show_job(fifth).state == "CANCELLED", job.explain)  # type: ignore[union-attr]
    wait_until(lambda: not job.is_in_queue(), job.explain)
    assert jobs_of(job) == [job.job_id, second, third, fourth] and job.state().job == fourth
    assert job.job.result()["stages"]["train"]["status"] == "done"
    assert f"Job {fifth}, which was to continue this run, is cancelled." in job.supervisor_log()


WAYS_TO_END = ("tango stop", "tango cancel", "scancel", "failure")


@pytest.fixture(scope="module")
def ended(folder: Path, cluster: list[str]) -> dict[str, CountingJob]:
    """Chains beside each other, each ended for good in its own way."""
    wrong = {"rank": 1, "step": 30, "action": "fail"}
    jobs = {
        how: CountingJob(
            folder, how, {"nodes": 1, "tasks_per_node": 2}, steps=4000, **(wrong if how == "failure" else {})
        )
        for how in WAYS_TO_END
    }
    launch = {"nodes": 1, "max_attempts_without_progress": 2}
    jobs["in vain"] = in_vain = CountingJob(folder, "in vain", launch, load_seconds=600)
    for job in jobs.values():
        job.submit(CHAIN)
    wait_for_jobs(in_vain, 2)
    slurm.run_command("scancel", "--batch", "--signal=USR2", in_vain.job_id)
    for how, job in jobs.items():
        if how != "in vain":
            job.wait_for_step(2)
        if how != "failure":
            wait_for_jobs(job, 3 if how == "in vain" else 2)
    slurm.run_command("scancel", "--batch", "--signal=USR2", jobs_of(in_vain)[-2])
    tango("stop", str(folder / "tango stop"))
    tango("cancel", str(folder / "tango cancel"))
    slurm.run_command("scancel", jobs["scancel"].job_id)
    for job in jobs.values():
        wait_until(lambda job=job: job.state().is_over and not job.is_in_queue(), job.explain)  # type: ignore[misc]
    return jobs


@pytest.mark.parametrize("how", WAYS_TO_END)
def test_what_somebody_ends_has_no_next_job(ended: dict[str, CountingJob], how: str) -> None:
    job = ended[how]
    (attempt,) = job.attempts()
    assert attempt.code == (1 if how == "failure" else 85)
    assert job.state().state == ("failed" if how == "failure" else "stopped")
    assert processes_of(job.job_id) == []
    assert how == "tango cancel" or jobs_of(job) == [job.job_id]  # else the user has cancelled both
    told = {
        "tango stop": "which was to continue this run, is cancelled.",
        "tango cancel": " was cancelled.",
        "scancel": f"Not continued: job {job.job_id} was cancelled.",
        "failure": "Not tried again: this attempt made no progress.",
    }
    assert told[how] in job.supervisor_log()
    if how != "failure":
        assert "Continue with: tango submit train " in job.supervisor_log()
        assert f"attempt {1}, train" in tango("logs", str(job.directory.path)).stdout


def test_a_chain_that_never_gets_past_loading_is_given_up(ended: dict[str, CountingJob]) -> None:
    job = ended["in vain"]
    given_up = f"given up: 2 attempts of jobs {', '.join(jobs_of(job)[:2])} in a row never got past loading"
    assert job.state().state == "failed" and job.state().detail.startswith(given_up)
    assert [attempt.code for attempt in job.attempts()] == [85, 85, 1] and len(jobs_of(job)) == 3


def test_a_sweep_is_no_chain(folder: Path) -> None:
    CountingJob(folder, "base")
    (folder / "sweep.yaml").write_text(
        yaml.safe_dump({"config": "base.yaml", "dir": str(folder / "swept"), "cells": [{}], "seeds": [0, 1]})
    )
    refused = tango("sweep", str(folder / "sweep.yaml"), "--profile", str(folder / "profile.yaml"), check=False)
    assert refused.returncode == 2 and "requeue: chain is for single runs" in refused.stderr
    assert not (folder / "swept").exists()
