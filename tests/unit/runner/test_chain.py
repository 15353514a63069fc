"""Chains of jobs while Slurm is silent or refuses: with a Slurm that says what a test wants."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.handle import RunJob
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.status import run_state
from tango_hpc.commands.submit import script
from tango_hpc.runner import chain as chains
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, chain_before, next_job, submitted_jobs
from tango_hpc.runner.chain import VARIABLE, Chain
from tango_hpc.runner.stop import StopRequest, request_stop
from tango_hpc.stages.stage import TRAIN
from tests.helpers.fake_slurm import GONE, FakeSlurm, described, submitted_run
from tests.slurm.jobs import counting_config

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class Following:
    """A chain whose job 7 runs, and what it says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = submitted_run(folder)
        self.files = self.directory.submitit_logs
        self.files.mkdir(parents=True, exist_ok=True)
        self.script = self.files / "7_submission.sh"
        for name in ("7_submission.sh", "7_submitted.pkl"):
            (self.files / name).write_text(name)
        self.told: list[str] = []
        self.chain = Chain(self.directory, "7", self.told.append)
        self.clock = 1000.0
        self.waits = 0
        self.then: Callable[[int], None] = lambda count: None
        monkeypatch.setattr(chains, "time", SimpleNamespace(monotonic=lambda: self.clock, sleep=self.wait))

    def wait(self, seconds: float) -> None:
        assert 0 < seconds <= 5
        self.clock += seconds
        self.waits += 1
        self.then(self.waits)

    def goes_on(self, seconds_left: float | None = 100) -> bool:
        return self.chain.goes_on(seconds_left, "tango go on", self.wait)


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    return Following(tmp_path, monkeypatch)


def test_the_next_job_is_submitted_once(fake: FakeSlurm, following: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", VARIABLE):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("PYTHONPATH", f"{following.directory.snapshot}:/mine")
    seen = following.files / "environment"
    fake.runs("sbatch", f"env >'{seen}'; echo '8;cluster'")
    for _ in range(3):
        following.chain.submit()
        following.clock += 100
    asked = [call for call in fake.calls() if call.startswith("sbatch")]
    assert asked == [f"sbatch --parsable --dependency=afterany:7 {following.script}"]
    told = "Job 8 continues this run when this one ends; it is cancelled if nothing is left to do."
    assert following.told == [told] and next_job(following.directory, "7") == "8"
    inherited = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert inherited["PYTHONPATH"] == "/mine" and inherited["SLURM_CONF"] == "/etc/slurm.conf"
    assert not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", VARIABLE} & set(
        inherited
    )
    # What submitit looks for under the new job's name; and the one after it knows all that came before.
    assert (following.files / "8_submitted.pkl").read_text() == "7_submitted.pkl"
    entry = submitted_jobs(following.directory)[-1]
    assert (entry["after"], entry["stages"], entry["log"]) == ("7", "train", str(following.files / "8_0_log.out"))
    fake.says("sbatch", "9")
    Chain(following.directory, "8", following.told.append).submit()
    assert chain_before(following.directory, "9") == ["8", "7"]


def test_whether_sbatch_has_taken_it_is_looked_up(fake: FakeSlurm, following: Following) -> None:
    fake.fails("sbatch", TIMED_OUT)  # and yet the job is there
    following.chain.submit()
    following.chain.submit()
    assert len([call for call in fake.calls() if call.startswith("sbatch")]) == 1, "once a minute"
    following.clock += 100
    following.chain.submit()  # nobody can tell: not submitted again
    following.clock += 100
    fake.says("squeue", f"8|{following.script}\n11|{following.script}.other\n12|(null)")
    following.chain.submit()
    assert len([call for call in fake.calls() if call.startswith("sbatch")]) == 1
    assert next_job(following.directory, "7") == "8"
    assert following.told[0].startswith("The job after this one is not submitted yet: sbatch: sbatch: error: Batch job")
    assert len(following.told) == 2


def test_in_the_end_it_is_tried_until_slurm_answers(fake: FakeSlurm, following: Following) -> None:
    def come_back(count: int) -> None:
        if count == 3:
            fake.says("scontrol", described("7"))
            fake.says("sbatch", "8")

    following.then = come_back
    assert following.goes_on() and following.waits == 3 and next_job(following.directory, "7") == "8"
    assert "Tried again for 95 s. Should none come, continue with: tango go on" in following.told[0]
    fake.fails("scontrol")
    assert following.goes_on(0), "it waits already, whatever Slurm says now"


def test_in_the_end_there_may_be_none(fake: FakeSlurm, following: Following) -> None:
    assert not following.goes_on(seconds_left=0)
    assert following.told[-1].startswith("Not continued: Slurm did not answer")
    fake.says("scontrol", described("7"))
    fake.fails("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    fake.says("squeue", "")
    started = following.clock
    assert not following.goes_on() and 95 <= following.clock - started <= 100, "to the end of the job"
    assert following.told[-1] == "Not continued: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit"
    started = following.clock
    assert not following.goes_on(86_400) and 600 <= following.clock - started <= 610, (
        "then it holds its nodes no longer"
    )
    started = following.clock
    fake.fails("scontrol")  # for a quarter of an hour, which is no refusal
    following.then = lambda _: fake.says("scontrol", described("7")) if following.clock >= started + 900 else None
    assert not following.goes_on(86_400) and 1500 <= following.clock - started <= 1520
    following.then = lambda _: None
    for state, more, why in (
        ("COMPLETING", {}, "job 7 was cancelled"),
        ("CANCELLED", {}, "job 7 was cancelled"),
    ):
        fake.says("scontrol", described("7", state, **more))
        assert not following.goes_on() and following.told[-1] == f"Not continued: {why}."
    fake.says("sbatch", "8")
    fake.says("scontrol", described("7", "COMPLETING", PreemptTime="2026-01-31T12:00:00"))
    assert following.goes_on(), "what the cluster ends goes on"
    answer = f'[ "$3" = 7 ] && echo "{described("7")}" || echo "{described("8", "CANCELLED")}"'
    fake.runs("scontrol", answer)
    assert not following.goes_on() and following.told[-1] == "Not continued: job 8 was cancelled."
    request_stop(following.directory, StopRequest("user", "tango stop by me"))
    assert not following.goes_on() and following.told[-1] == "Not continued: tango stop by me."


def test_a_next_job_that_cannot_be_cancelled_does_nothing(fake: FakeSlurm, following: Following) -> None:
    fake.says("sbatch", "8")
    following.chain.submit()
    following.chain.end("job 7 has ended the chain")
    assert 60 <= 5 * following.waits <= 70, "then it holds its nodes no longer"
    assert following.told[-1].endswith("it will do nothing.") and next_job(following.directory, "7") == "8"
    assert Chain(following.directory, "8", print).why_not() == "job 7 has ended the chain"

    fake.says("scontrol", described("8", "PENDING"))
    fake.says("scancel", "")
    following.chain.end("job 7 has ended the chain")
    assert fake.calls()[-1] == "scancel 8" and next_job(following.directory, "7") is None
    fake.fails("scontrol", GONE)
    calls = len(fake.calls())
    following.chain.end("")
    assert len(fake.calls()) == calls, "nobody is asked where there is nothing to cancel"


def test_who_was_cancelled_has_no_next_job_either(fake: FakeSlurm, following: Following) -> None:
    fake.says("sbatch", "8")
    following.chain.submit()
    second = Chain(following.directory, "8", print)
    fake.says("scontrol", described("7", "CANCELLED"))
    assert second.why_not() == "job 7 was cancelled"
    fake.says("scontrol", described("7", "TIMEOUT"))
    assert second.why_not() is None
    fake.fails("scontrol")
    assert second.why_not() is None, "nobody knows"


def test_which_jobs_are_of_a_chain(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    env = {"SLURM_JOB_ID": "7", VARIABLE: "1", slurm.BATCH_MARK: f"7:{os.getpid()}"}
    assert Chain.of_this_job(directory, print, env) is not None
    for missing in env:
        assert Chain.of_this_job(directory, print, {k: v for k, v in env.items() if k != missing}) is None
    config = counting_config(tmp_path, "run", {"nodes": 1})
    for requeue, option in ((True, "requeue"), (False, "no-requeue"), ("chain", "no-requeue")):
        text = script("train", config, Profile.model_validate({"requeue": requeue}))
        assert f"#SBATCH --{option}\n" in text and (f"export {VARIABLE}=1\n" in text) == (requeue == "chain")


@pytest.mark.parametrize(
    ("code", "queue", "state", "job"),
    [
        (None, {"7": ("RUNNING", "None"), "8": ("PENDING", "Dependency")}, "running", "7"),
        (85, {"7": ("COMPLETED", "None"), "8": ("PENDING", "Priority")}, "waiting", "8"),
        (85, {"8": ("RUNNING", "None")}, "running", "8"),
        (85, {"8": ("FAILED", "NonZeroExitCode")}, "failed", "8"),
        (85, {"8": ("CANCELLED", "None")}, "stopped", "8"),
        (0, {"8": ("CANCELLED", "None")}, "done", "7"),
        (0, {}, "done", "7"),
        (None, {}, "lost", "7"),
        (None, {"8": ("PENDING", "Priority")}, "waiting", "8"),
    ],
)
def test_what_status_says_of_a_chain(
    fake: FakeSlurm, following: Following, code: int | None, queue: dict[str, tuple[str, str]], state: str, job: str
) -> None:

    fake.says("sbatch", "8")
    following.chain.submit()
    log = AttemptLog(following.directory)
    if code is not None:
        log.end(replace(log.read()[0], program=TRAIN), code, "")
    found = run_state(following.directory, queue)
    assert (found.state, found.job, found.stage) == (state, job, "train"), found


def test_a_job_of_python_ends_the_whole_chain(fake: FakeSlurm, following: Following) -> None:
    job = RunJob(following.files, "7", following.directory.path)
    assert job.paths.result_pickle == following.files / "7_0_result.pkl"
    fake.says("sbatch", "8")
    following.chain.submit()
    assert job.paths.job_id == "7", "the next one has not started"
    answer = f'[ "$3" = 7 ] && echo "{described("7")}" || echo "{described("8", "PENDING")}"'
    fake.runs("scontrol", answer)
    fake.says("scancel", "")
    job.cancel()
    assert [call for call in fake.calls() if call.startswith("scancel")] == ["scancel 8", "scancel 7"]
