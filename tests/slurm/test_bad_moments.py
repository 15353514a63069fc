"""Bad moments on two real nodes: suspended, extended, never started, refused. Jobs that have to wait do so together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tango_hpc.base.config import Config
from tango_hpc.commands.profiles import Profile
from tango_hpc.commands.submit import script
from tango_hpc.runner import slurm
from tests.slurm.jobs import PROFILE, CountingJob, counting_config, tango, wait_until

pytestmark = pytest.mark.usefixtures("cluster")
HANG_SECONDS = 13
ONE_RANK = {"nodes": 1, "grace_seconds": 10}


@dataclass
class Moments:
    """Two runs beside each other."""

    suspended: CountingJob
    extended: CountingJob
    suspended_at: float = 0.0
    told: str = ""  # by `tango status` of the suspended one
    step: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a profile for the command line."""
    made = tmp_path_factory.mktemp("moments")
    (made / "profile.yaml").write_text(yaml.safe_dump({"time": "10", "env": PROFILE.env}))
    return made


@pytest.fixture(scope="module")
def moments(folder: Path, cluster: list[str]) -> Moments:
    """One run that is suspended for longer than it may hang, one whose limit of a minute is extended."""
    one_minute = PROFILE.model_copy(update={"time": "1", "sbatch": {"signal": "B:USR2@0"}})
    found = Moments(
        CountingJob(folder, "suspended", {**ONE_RANK, "hang_timeout_seconds": HANG_SECONDS}, steps=4000).submit(),
        CountingJob(folder, "extended", ONE_RANK, steps=4000, step_seconds=0.2).submit(one_minute),
    )
    wait_until(lambda: bool(found.extended.attempts()), found.extended.explain)
    slurm.run_command("scontrol", "update", f"jobid={found.extended.job_id}", "timelimit=10")
    found.suspended.wait_for_step(2)
    slurm.run_command("scontrol", "suspend", found.suspended.job_id)
    wait_until(lambda: found.suspended.state().job_state == "SUSPENDED", found.suspended.explain)
    wait_until(lambda: _stands_still(found.suspended), found.suspended.explain)  # slurmd takes a while to stop it
    found.suspended_at, found.step = time.monotonic(), found.suspended.steps_logged()[-1]
    found.told = tango("status", str(found.suspended.directory.path)).stdout
    return found


def _stands_still(job: CountingJob) -> bool:
    """Whether it does no step in ten times as long as a step takes."""
    before = job.steps_logged()
    time.sleep(1)
    return job.steps_logged() == before


def test_a_job_that_never_started_may_change_its_settings(moments: Moments, folder: Path) -> None:
    """Cancelled while it waited; submitted again with another setting; then refused by Slurm with a third one."""
    counting_config(folder, "waited", ONE_RANK)
    run, submit = folder / "waited", ["submit", "train", str(folder / "waited.yaml")]
    (folder / "later.yaml").write_text(yaml.safe_dump({"time": "10", "sbatch": {"begin": "now+1hour"}}))
    tango(*submit, "--profile", str(folder / "later.yaml"))
    assert " train PENDING " in tango("status", str(run)).stdout
    assert "was waiting and is cancelled" in tango("stop", str(run)).stdout
    assert tango("logs", str(run)).stdout.startswith("no attempt yet, stopped: job ")
    tango(*submit, "algorithm.kl_coef=0.5", "--profile", str(folder / "later.yaml"))
    tango("cancel", str(run))
    before = {file: file.read_bytes() for file in (run / "config.yaml", run / "control" / "jobs.json")}
    assert b"kl_coef: 0.5" in before[run / "config.yaml"]
    (folder / "refused.yaml").write_text(yaml.safe_dump({"partition": "nowhere"}))
    changed = [*submit, "algorithm.kl_coef=0.7", "--profile", str(folder / "refused.yaml")]
    for words in (changed, [*changed, f"run.dir={folder}/new"]):
        refused = tango(*words, check=False)
        tried = tango(*words, "--dry-run", check=False)
        assert refused.returncode == tried.returncode == 2
        assert "invalid partition" in refused.stderr.lower() and "invalid partition" in tried.stderr.lower()
    assert {file: file.read_bytes() for file in before} == before and not (folder / "new").exists()


def test_names_and_places_that_are_refused(folder: Path) -> None:
    counting_config(folder, "named", ONE_RANK)
    for name, told in (("12:30", "holds a colon"), ("a\\b", "a backslash")):
        refused = tango("submit", "train", str(folder / "named.yaml"), f"run.dir={folder}/{name}", check=False)
        assert refused.returncode == 2 and told in refused.stderr
    mistyped = f"run.dir={folder}/extnded"
    refused = tango("submit", "train", str(folder / "named.yaml"), mistyped, "--resume", check=False)
    assert refused.returncode == 2 and "there is no run to resume in" in refused.stderr


def test_gpus_and_memory_are_asked_for_as_slurm_takes_them(folder: Path) -> None:
    """By each of its ways, and memory by the plan. One kind of GPU: n2 alone has large ones."""
    role = {"model": {"path": str(folder / "model")}}
    tree = {
        "run": {"dir": str(folder / "cards")}, "task": {"name": "math"}, "data": {"train": "/d/t", "eval": "/d/e"},
        "generator": role, "verifier": role, "launch": {"nodes": 2, "tasks_per_node": 2},
    }  # fmt: skip
    config = Config.model_validate(tree)
    asked = {
        how: script("train", config, Profile.model_validate({"cpus_per_rank": 2, "gpu_type": "small", **more}))
        for how, more in {
            "node": {},
            "gres": {"gpu_request": "gres"},
            "task": {"gpu_request": "gpus-per-task"},
            "bound": {"gpu_request": "gpus-per-task", "sbatch": {"gpu-bind": "single:1"}},
            "large": {"gpu_type": "large"},
        }.items()
    }
    assert all("#SBATCH --mem=" in text and "--mem=0" not in text for text in asked.values())
    taken = {how: slurm.would_take(text) for how, text in asked.items()}
    assert {how: answer for how, (answer, _) in taken.items()} == {
        "node": True, "gres": True, "task": True, "bound": True, "large": False
    }, taken  # fmt: skip
    assert "Requested node configuration is not available" in taken["large"][1]


def test_a_suspended_job_does_not_hang(moments: Moments) -> None:
    job = moments.suspended
    time.sleep(max(0.0, HANG_SECONDS + 4 - (time.monotonic() - moments.suspended_at)))
    assert job.steps_logged()[-1] == moments.step, "it did not sleep"
    slurm.run_command("scontrol", "resume", job.job_id)
    assert " train SUSPENDED " in moments.told
    job.wait_for_step(job.steps_logged()[-1] + 20)
    (attempt,) = job.attempts()
    assert attempt.ended is None and job.state().state == "running"
    tango("stop", str(job.directory.path))
    assert job.wait_for_end().state == "stopped"
    assert job.steps_logged() == list(range(1, job.steps_logged()[-1] + 1))


def test_a_limit_that_was_extended_ends_nothing(moments: Moments, folder: Path) -> None:
    job = moments.extended
    started = job.attempts()[0].started
    wait_until(lambda: time.time() > started + 55, job.explain)  # by the old limit it would have left at 50
    job.wait_for_step(job.steps_logged()[-1] + 2)
    (attempt,) = job.attempts()
    assert attempt.ended is None and job.state().state == "running"
    tango("stop", str(job.directory.path))
    watched = tango("status", str(folder), "--watch").stdout.splitlines()  # until all runs below are over
    stopped = {line.split()[0] for line in watched if " train STOPPED " in line}
    assert {"suspended", "extended"} <= stopped and max(map(len, watched)) <= 80, watched
