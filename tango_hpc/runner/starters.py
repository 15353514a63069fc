"""The two ways to start a run's ranks: as processes of this machine, or as one srun step over the allocation."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tango_hpc.base.config.schema import Config
from tango_hpc.base.errors import NodeFailed, UserError
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import RANKS_OF_TASK, Worker
from tango_hpc.runner import slurm
from tango_hpc.runner.environment import free_port, python_path, threads_of_rank
from tango_hpc.runner.guard import SUPERVISED
from tango_hpc.runner.outcome import LAST_WORDS, Outcome, describe_death, said_last
from tango_hpc.runner.program import Program
from tango_hpc.runner.staging import VARIABLE as STAGE_WEIGHTS_TO

LOOPBACK = "lo"
CODE_ROOT = Path(__file__).resolve().parents[2]
# Within which models are to be on the nodes' own disks; less than a lock's holder may be silent
# (lock.ABANDONED_SECONDS).
STAGING_SECONDS = 1500.0
# How long Slurm is asked to end a step; it takes a second or two, if its controller answers.
KILL_SECONDS = 60.0
KILL_AGAIN_SECONDS = 10.0
# A step that is killed while Slurm launches its tasks may hang there, and Slurm then drains the node (seen with 22.05).
LAUNCH_SECONDS = 3.0
# How often srun is started where it fails before any task has said a word, and how long it waits in between.
MAX_STARTS = 3
START_AGAIN_SECONDS = 10.0


class Starter(Protocol):
    """Starts all ranks once and ends them."""

    def start(self) -> None:
        """Start every rank."""

    def running(self) -> bool:
        """Return whether any rank is still there."""

    def deaths(self) -> list[Outcome]:
        """Return the ranks that ended badly so far, by the operating system or srun, in the order of their end."""

    def kill(self) -> None:
        """End what is left, at once, on every node, and wait for it."""


def rank_command(program: Program) -> tuple[str, ...]:
    """Return the words of a task before the run directory and the program's name.

    To run in a container, TANGO_RANK_COMMAND replaces them, and TANGO_SRUN_OPTIONS are further options of the step.
    """
    return tuple(shlex.split(os.environ.get("TANGO_RANK_COMMAND", ""))) or own_command(program)


def own_command(program: Program) -> tuple[str, ...]:
    """Return the words that start a task with this Python."""
    return (sys.executable, "-P", "-m", program.rank_module)


def rank_environment(config: Config) -> dict[str, str]:
    """Return the variables of every task beside its place: this very code, thread counts, no access to a model hub."""
    threads = str(threads_of_rank(config.launch))
    variables = {
        "PYTHONPATH": python_path(CODE_ROOT),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if config.launch.nodes == 1:  # without it Gloo listens at the address of the machine's name
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    return variables


class LocalStarter:
    """One task on this machine, which is all `launch.tasks_per_node` ranks; it leads a process group of its own.

    That keeps a Ctrl-C in the terminal from reaching it, and lets `kill` reach all of its processes and their helpers.
    """

    def __init__(
        self, directory: RunDirectory, program: Program, config: Config, command: Sequence[str] | None = None
    ) -> None:
        self._directory = directory
        self._config = config
        self._program = program
        self._command = [*(command or rank_command(program)), str(directory.path), program.name]
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words, self._said = -1, b""

    def start(self) -> None:
        size = self._config.launch.tasks_per_node
        place = {
            "RANK": 0, RANKS_OF_TASK: size, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size,
            "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
            # What a container's command starts may have another parent.
            SUPERVISED: os.getpid() if tuple(self._command[:4]) == own_command(self._program) else "wrapped",
        }  # fmt: skip
        self._last_words, writes = os.pipe()
        os.set_blocking(self._last_words, False)
        env = rank_environment(self._config) | {key: str(value) for key, value in place.items()}
        self._process = self._spawn(env | {LAST_WORDS: str(writes)}, writes)
        os.close(writes)

    def _spawn(self, env: Mapping[str, str], writes: int) -> subprocess.Popen[bytes]:
        """Start the task, with `env` beside this process's own; `writes`: the end of the pipe that it inherits."""
        with self._directory.log_file(Worker(0)).open("ab") as log:
            return subprocess.Popen(
                self._command,
                env=os.environ | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=(writes,),
            )

    def running(self) -> bool:
        assert self._process is not None
        return self._process.poll() is None

    def deaths(self) -> list[Outcome]:
        assert self._process is not None
        code = self._process.poll()
        if self._last_words >= 0:
            with suppress(BlockingIOError):
                while block := os.read(self._last_words, 2**16):
                    self._said += block
        words = said_last(self._said)
        if words or code in (None, 0):
            return words
        return [Outcome(None, error=f"the process that had started the ranks is gone: {describe_death(code)}")]

    def kill(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._last_words >= 0:
            self.deaths()  # reads what was said
            os.close(self._last_words)
            self._last_words = -1


_SRUN_ERROR = re.compile(r"^srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<what>.+)$", re.MULTILINE)


def deaths_in_srun_output(text: str) -> list[Outcome]:
    """Return the ranks that srun reports as killed or failed, in the order in which it noticed."""
    deaths: list[Outcome] = []
    for match in _SRUN_ERROR.finditer(text):
        rank = int(re.split(r"[,\-\[\]]", match["tasks"].strip("[]"))[0])
        what = match["what"]
        if what == "Killed":
            what = "killed by SIGKILL (out of memory? see seff or sacct)"
        deaths.append(Outcome(rank, error=what, host=match["host"]))
    return deaths


# SIGUSR2 and SIGTERM may reach a task before Python has installed its handlers, and would kill it.
IGNORE_UNTIL_READY = ("bash", "-c", 'trap "" USR2 TERM; exec "$@"', "rank")


class SrunStarter:
    """One srun step with one task per rank over the whole allocation. `say` prints a line.

    Where srun fails before any task has left a sign of life (a busy controller, a node that does not answer), it is
    started again.
    """

    def __init__(
        self, directory: RunDirectory, program: Program, config: Config, say: Callable[[str], None] = print
    ) -> None:
        self._directory = directory
        self._say = say
        self._config = config
        self._command = [*rank_command(program), str(directory.path), program.name]
        self._process: subprocess.Popen[bytes] | None = None
        # Nobody else's: of an array's tasks one bears the id of them all.
        self._name = f"ranks-{slurm.job_id()}-{os.getpid()}"
        self._messages = directory.srun_log
        self._messages_start = 0
        self._num_starts = 0
        self._started = 0.0  # by time.monotonic()
        self._start_again_at: float | None = None

    def arguments(self) -> list[str]:
        """Return the srun command line."""
        launch = self._config.launch
        logs = str(self._directory.logs).replace("%", "%%")
        return [
            "srun",
            f"--job-name={self._name}",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            "--wait=60",
            f"--nodes={launch.nodes}",
            f"--ntasks={self._config.world_size}",
            f"--ntasks-per-node={launch.tasks_per_node}",
            # Neighbors in rank are neighbors on a node and on its sockets, as GPUs are, whatever the site's default.
            "--distribution=block:block",
            # Not through srun's own pipe: an orphan that held it would keep srun waiting.
            f"--output={logs}/rank_%5t.log",
            "--open-mode=append",
            *shlex.split(os.environ.get("TANGO_SRUN_OPTIONS", "")),
            *IGNORE_UNTIL_READY,
            *self._command,
        ]

    def start(self) -> None:
        if os.environ.get(STAGE_WEIGHTS_TO):
            self._stage_weights()
        self._run()

    def _run(self) -> None:
        env = os.environ | rank_environment(self._config) | {SUPERVISED: "srun"}
        if "SLURM_CPUS_PER_TASK" in env:
            env["SRUN_CPUS_PER_TASK"] = env["SLURM_CPUS_PER_TASK"]
        self._messages_start = self._messages.stat().st_size if self._messages.exists() else 0
        self._num_starts, self._started = self._num_starts + 1, time.monotonic()
        with self._messages.open("ab") as log:
            self._process = subprocess.Popen(
                self.arguments(),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _stage_weights(self) -> None:
        """Copy the models to every node's own disk. Raises NodeFailed where that fails."""
        nodes = self._config.launch.nodes
        words = ["srun", "--export=ALL", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        program = [sys.executable, "-P", "-m", "tango_hpc.runner.staging", str(self._directory.path)]
        target = os.environ[STAGE_WEIGHTS_TO]
        try:
            done = subprocess.run(
                [*words, *program],
                env=os.environ | rank_environment(self._config),
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=STAGING_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise NodeFailed(
                f"copying the models to {target} was not done within {STAGING_SECONDS:.0f} s: look at that disk on the "
                "job's nodes, or leave stage_weights_to out of the profile"
            ) from None
        if done.returncode != 0:
            raise NodeFailed(f"could not copy the models to {target}: {done.stderr.strip()}")

    def running(self) -> bool:
        assert self._process is not None
        if self._process.poll() is None:
            return True
        if not self._starts_again():
            return False
        if self._start_again_at is None:
            self._start_again_at = time.monotonic() + START_AGAIN_SECONDS
            reason = (self._said().strip().splitlines() or [f"exit code {self._process.poll()}"])[-1]
            self._say(f"srun has not started the ranks ({reason}): tried again in {START_AGAIN_SECONDS:.0f} s")
        elif time.monotonic() > self._start_again_at:
            self._start_again_at = None
            self._run()
        return True

    def deaths(self) -> list[Outcome]:
        assert self._process is not None
        text, code = self._said(), self._process.poll()
        found = deaths_in_srun_output(text)
        if not found and code not in (None, 0) and not self._starts_again():
            found = [Outcome(None, error=f"srun ended with exit code {code}", traceback=text[-4000:])]
        return found

    def _said(self) -> str:
        """Return the output of srun since its last start."""
        with self._messages.open("rb") as file:
            file.seek(self._messages_start)
            return file.read().decode(errors="replace")

    def _starts_again(self) -> bool:
        """Return whether srun has failed, was started less than `MAX_STARTS` times, and no task has ever been
        heard of.
        """
        assert self._process is not None
        signs = (self._directory.heartbeats, self._directory.outcomes)
        return (
            (self._process.poll() or 0) > 0
            and self._num_starts < MAX_STARTS
            and not deaths_in_srun_output(self._said())
            and not any(file for folder in signs for file in folder.glob("rank_*"))
        )

    def kill(self) -> None:
        """Send SIGKILL to every task through Slurm; srun itself must live until the step has gone.

        Without an answer from Slurm that is tried for a while, then srun ends alone: what is left ends with the job.
        """
        if self._process is None:
            return
        self._num_starts = MAX_STARTS
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(self._started + LAUNCH_SECONDS - time.monotonic(), 0.0))
        job, until = os.environ["SLURM_JOB_ID"], time.monotonic() + KILL_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            with suppress(UserError):
                slurm.kill_steps(job, self._name)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=KILL_AGAIN_SECONDS)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
