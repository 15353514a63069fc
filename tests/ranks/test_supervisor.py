"""The supervisor with local ranks: every way in which an attempt can end."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tango_hpc.base.config import config_to_yaml
from tango_hpc.base.config.load import validate_tree
from tango_hpc.base.errors import NodeFailed
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker
from tango_hpc.report.live_view import ProgressView
from tango_hpc.runner.deadline import Deadline
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.environment import free_port
from tango_hpc.runner.heartbeat import is_loading
from tango_hpc.runner.outcome import Outcome, read_outcomes, write_outcome
from tango_hpc.runner.starters import LocalStarter
from tango_hpc.runner.stop import StopRequest, request_stop
from tango_hpc.runner.supervisor import Supervisor
from tango_hpc.stages.stage import TRAIN
from tests.helpers.counter_rank import RANK_COMMAND, counted

FIRST = Worker(0, "generator")
BOTH = ["generator", "verifier"]


def make_run(path: Path, launch: dict[str, Any] | None = None, **behaviour: Any) -> Supervisor:
    """A run directory for the counting ranks, and a supervisor of it."""
    model = {"path": "model", "build": {}}
    role = {"model": model, "max_prompt_tokens": 64, "max_response_tokens": 64, "rollout": {"kv_cache_gb": 0.1}}
    tree = {
        "run": {"dir": str(path)},
        "task": {"name": "last_letter"},
        "data": {"train": "train.parquet", "eval": "eval.parquet"},
        "generator": role,
        "train": {"verifier_warmup_steps": 0, "verifier_steps_per_cycle": 0, "questions_per_step": 4},
        "launch": {"device": "cpu", "dtype": "float32", "tasks_per_node": 2, "grace_seconds": 20} | (launch or {}),
    }
    config = validate_tree(tree, "test")
    directory, _ = enter_run(path, config_to_yaml(config), resume=path.exists())
    path.with_name(f"{path.name}.behaviour.json").write_text(json.dumps({"steps": 5, "step_seconds": 0.02} | behaviour))
    console = Console(file=io.StringIO(), width=200)
    starter = LocalStarter(directory, TRAIN, config, RANK_COMMAND)
    return Supervisor(
        directory,
        config,
        behaviour.get("roles", ["generator"]),
        starter,
        console,
        partial(ProgressView, directory, console),
    )


def output(supervisor: Supervisor) -> str:
    assert isinstance(supervisor.console.file, io.StringIO)
    return supervisor.console.file.getvalue()


def wait_for(what: Any, timeout: float = 240) -> None:
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_to_its_end(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "a run")
    assert supervisor.run() == 0
    assert counted(supervisor.directory) == 5


def test_stop_file_saves_and_resumes(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "run", steps=4000, step_seconds=0.05, gloo=True)

    def ask() -> None:
        log = supervisor.directory.log_file(FIRST)
        wait_for(lambda: "step 3" in log.read_text() and not is_loading(supervisor.directory))
        request_stop(supervisor.directory, StopRequest("user", "tango stop"))

    supervisor.directory.log_file(FIRST).touch()
    asker = threading.Thread(target=ask)
    asker.start()
    assert supervisor.run() == 85
    asker.join()
    stopped_at = counted(supervisor.directory)
    assert 3 <= stopped_at < 4000
    supervisor.directory.stop_file.unlink()
    again = make_run(tmp_path / "run", steps=stopped_at + 2)
    assert again.run() == 0
    assert counted(again.directory) == stopped_at + 2
    log = supervisor.directory.log_file(Worker(1, "generator")).read_text()
    assert log.count(f"rank 1 step {stopped_at}\n") == 1 and f"rank 1 step {stopped_at + 1}\n" in log


@pytest.mark.parametrize(
    ("action", "code", "told"),
    [
        (
            "fail",
            1,
            "rank 1 ({role}) on {host} failed in phase 'rollout': ValueError: the loss went for a walk\nTraceback",
        ),
        ("check", 78, "CheckFailed: the data set has no column 'question'"),
        ("kill", 1, "rank 1 ({role}) on {host} failed in phase 'rollout': killed by SIGKILL (out of memory?"),
        ("crash", 1, "rank 1 ({role}) on {host} failed in phase 'rollout': Fatal Python error: Segmentation fault"),
    ],
)
@pytest.mark.parametrize(("roles", "role"), [(["generator"], "generator"), (BOTH, "generator"), (BOTH, "verifier")])
def test_one_process_fails(tmp_path: Path, action: str, code: int, told: str, roles: list[str], role: str) -> None:
    how = {"rank": 1, "step": 2, "action": action, "step_seconds": 0.4, "gloo": action == "kill"}
    supervisor = make_run(tmp_path / "run", roles=roles, role=role, **how)
    assert supervisor.run() == code
    assert told.format(role=role, host=os.uname().nodename) in output(supervisor)
    assert output(supervisor).startswith("rank 1 ")
    assert ("Traceback" in output(supervisor)) == (action == "fail")
    assert not supervisor.starter.running()


@pytest.mark.parametrize(("action", "code"), [("none", 0), ("fail", 1), ("check", 78), ("stop", 85), ("kill", 1)])
@pytest.mark.parametrize("supervised", [True, False])
def test_the_exit_code_of_a_task_is_that_of_its_outcomes_unless_a_supervisor_reads_it(
    tmp_path: Path, action: str, code: int, supervised: bool
) -> None:
    directory = make_run(tmp_path / "run", {"tasks_per_node": 1}, rank=0, step=1, action=action).directory
    if action == "stop":
        request_stop(directory, StopRequest("supervisor", "test"))
    directory.outcomes.mkdir(exist_ok=True)
    for worker in (Worker(0), FIRST):  # an attempt before it was stopped, and nobody cleared what it left
        write_outcome(directory, Outcome(*worker, code=85))
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    env = os.environ | place | ({"TANGO_SUPERVISED": "srun"} if supervised else {})
    done = subprocess.run([*RANK_COMMAND, str(directory.path), "train"], env=env, capture_output=True, check=False)
    assert done.returncode == (0 if supervised else code)
    assert {worker: outcome.code for worker, outcome in read_outcomes(directory).items()} == {FIRST: code}


@pytest.mark.parametrize(("roles", "role"), [(["generator"], "generator"), (BOTH, "generator"), (BOTH, "verifier")])
def test_a_hang_names_rank_role_and_phase(tmp_path: Path, roles: list[str], role: str) -> None:
    launch = {"hang_timeout_seconds": 12, "grace_seconds": 5}
    how = {"rank": 1, "step": 2, "action": "hang", "step_seconds": 0.4, "gloo": True}
    supervisor = make_run(tmp_path / "run", launch, roles=roles, role=role, **how)
    assert supervisor.run() == 1
    text = output(supervisor)
    assert text.startswith(f"rank 1 ({role}) on ") and "failed in phase 'rollout': hangs: no progress for" in text
    assert "time.sleep(600)" in text


def test_a_long_phase_that_advances_is_no_hang(tmp_path: Path) -> None:
    """A verifier's rank writes twice as long as the limit; its generator waits for it, the other rank for both."""
    launch = {"hang_timeout_seconds": 12, "grace_seconds": 5}
    how = {"rank": 1, "role": "verifier", "step": 2, "action": "write", "gloo": True}
    supervisor = make_run(tmp_path / "run", launch, roles=BOTH, **how)
    started = time.monotonic()
    assert supervisor.run() == 0, output(supervisor)
    assert time.monotonic() - started > 24 and counted(supervisor.directory) == 5


def test_no_safe_point_within_the_grace_time(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "run", {"grace_seconds": 1}, steps=1, step_seconds=60)
    log = supervisor.directory.log_file(FIRST)

    def ask() -> None:
        wait_for(lambda: supervisor.directory.log_file(FIRST).exists() and ranks_are_in_rollout(supervisor.directory))
        supervisor.directory.stop_file.write_text("tango stop")

    threading.Timer(1, ask).start()
    assert supervisor.run() == 1, log.read_text()
    assert "no safe point within launch.grace_seconds=1: ended without saving" in output(supervisor)


def test_a_stop_while_loading_loses_nothing_and_takes_no_time(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "run", load_seconds=300)
    threading.Timer(1, lambda: supervisor.directory.stop_file.write_text("tango stop")).start()
    started = time.monotonic()
    assert supervisor.run() == 85
    assert time.monotonic() - started < 60
    assert "ended while loading, there was nothing to save" in output(supervisor)


def test_a_deadline_needs_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tango_hpc.runner.deadline.REFRESH_SECONDS", 0.5)
    supervisor = make_run(tmp_path / "run", {"grace_seconds": 20}, steps=100_000, step_seconds=0.05)
    supervisor.deadline = Deadline(lambda: 3600 if is_loading(supervisor.directory) else 10)
    assert supervisor.run() == 85
    assert "the time limit is near: saving at the next safe point" in output(supervisor)
    assert counted(supervisor.directory) >= 1


def test_a_file_system_that_is_away_for_a_while_ends_no_run(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "run", steps=40)
    turns = itertools.count()

    def look() -> None:
        if next(turns) % 4:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/scratch")

    supervisor.on_poll = look
    assert supervisor.run() == 0, output(supervisor)
    assert counted(supervisor.directory) == 40 and next(turns) > 4


def test_what_keeps_ranks_from_starting_is_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(starter: LocalStarter) -> None:
        raise NodeFailed("could not copy the models to /scratch: no room")

    supervisor = make_run(tmp_path / "run")
    monkeypatch.setattr(LocalStarter, "start", refuse)
    assert supervisor.run() == 75
    assert supervisor.reason == "could not copy the models to /scratch: no room"


def test_processes_of_one_machine_listen_where_no_other_machine_reaches_them(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "run", steps=100_000, step_seconds=0.05, gloo=True)
    found: set[str] = set()

    def look() -> None:
        wait_for(lambda: ranks_are_in_rollout(supervisor.directory))
        for pid in rank_pids(supervisor.directory.path):
            found.update(listens_at(pid))
            # Whatever address this machine's name has.
            assert b"GLOO_SOCKET_IFNAME=lo" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        request_stop(supervisor.directory, StopRequest("user", "seen enough"))

    with ThreadPoolExecutor() as beside:
        looked = beside.submit(look)
        assert supervisor.run() == 85
        looked.result()
    assert found == {"127.0.0.1"}


def listens_at(pid: int) -> set[str]:
    """The addresses at which a process listens."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                raw = bytes.fromhex(words[1].partition(":")[0])
                in_order = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, in_order))
    return found


def test_a_time_limit_that_ends_loading_says_so(tmp_path: Path) -> None:
    supervisor = make_run(tmp_path / "run", load_seconds=300)
    supervisor.deadline = Deadline(lambda: 10)
    assert supervisor.run() == 85
    assert supervisor.reason == "the time limit is near: ended while loading, there was nothing to save"


def ranks_are_in_rollout(directory: RunDirectory) -> bool:
    beats = list(directory.heartbeats.glob("rank_*.json"))
    return len(beats) == 2 and all("rollout" in beat.read_text() for beat in beats)


def start_program(path: Path) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, as a terminal or Slurm would start it."""
    make_run(path, steps=100_000, step_seconds=0.05)
    program = f"import tests.ranks.test_supervisor as t; from pathlib import Path; t.main(Path({str(path)!r}))"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = path / "logs" / "rank_00000.generator.log"
    # Heartbeats tell of the first safe point a little after it was passed.
    wait_for(lambda: log.exists() and "step 2" in log.read_text() and not is_loading(RunDirectory(path)))
    return process


def main(path: Path) -> None:
    supervisor = make_run(path, steps=100_000, step_seconds=0.05)
    code = supervisor.run()
    print(output(supervisor))
    sys.exit(code)


def rank_pids(path: Path) -> list[int]:
    return [json.loads(file.read_text())["pid"] for file in (path / "heartbeat").glob("rank_*.json")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves(tmp_path: Path, number: signal.Signals) -> None:
    process = start_program(tmp_path / "run")
    started = time.monotonic()
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 85, text
    assert time.monotonic() - started < 60
    assert "saving at the next safe point" in text
    assert counted(RunDirectory(tmp_path / "run")) >= 2


def test_a_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    process = start_program(tmp_path / "run")
    pids = rank_pids(tmp_path / "run")
    assert len(pids) == 2 and all(map(is_alive, pids))
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, pids)), 30)
