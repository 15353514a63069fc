"""`tango submit`: a stage as a batch job, through submitit. Nothing is submitted that a compute node could not
start.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import StoppedEarly, UserError
from tango_hpc.base.files import write_for_owner
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.commands.profiles import (
    Profile,
    export_lines,
    load_profile,
    setup_lines,
    time_limit_minutes,
    variables_here,
)
from tango_hpc.commands.resources import Memory, asked_of_a_node, cpus_per_rank, node_memory
from tango_hpc.runner import slurm
from tango_hpc.runner.attempts import AttemptLog, remember_job
from tango_hpc.runner.chain import VARIABLE as CHAIN
from tango_hpc.runner.enter import RunBackup, prepare_run
from tango_hpc.runner.environment import python_path
from tango_hpc.runner.lock import check_lock
from tango_hpc.runner.queued import check_no_job_waits
from tango_hpc.runner.snapshot import take_snapshot
from tango_hpc.stages.job import run_job
from tango_hpc.stages.stage import stages_named

Cluster = Literal["slurm", "local", "debug"]
# Room for the supervisor around the ranks' launch.grace_seconds.
SIGNAL_AHEAD_SECONDS = 30
# What runs in the background of this machine ends when it is done: submitit wants a time all the same.
NO_LIMIT_MINUTES = 10 * 365 * 24 * 60
# The variables of the profile's `env`, in the snapshot of a submission; only the user may read it.
PRIVATE_VARIABLES = "job_variables.sh"
NODE_LOCAL = ("/tmp", "/dev/shm", "/var/tmp", "/run")


def submit(
    stages: str,
    config: str | Path | Config,
    *overrides: str,
    profile: str | Profile | None = None,
    cluster: Cluster = "slurm",
    resume: bool = False,
) -> Any:
    """Submit a stage, or several as "sft,train", and return submitit's job; its `result()` is the run's summary.

    `config` is a YAML file, which `overrides` ("key.path=value") change, or a ready `Config`. `profile` names a
    cluster profile. Cluster "local" runs it in the background of this machine, "debug" in this process.
    Raises UserError for every mistake that can be found before a compute node is asked for.

        job = tango_hpc.submit("train", "configs/quickstart.yaml", "seed=1", profile="mycluster")
    """
    settings = config if isinstance(config, Config) else load_config(Path(config), overrides)
    chosen = profile if isinstance(profile, Profile) else load_profile(profile)
    programs = stages_named(stages)
    check_submission(settings, chosen, cluster)
    memory = node_memory([settings], programs, chosen)
    asked = asked_of_a_node(settings, chosen, memory)
    directory = RunDirectory(settings.run.dir)
    folder = directory.submitit_logs
    backup = RunBackup(directory, was_there=directory.path.exists())
    prepare_run(programs, settings, resume=resume)
    try:
        take_job_files(chosen, directory.snapshot, [settings])
        with job_environment(chosen, directory.snapshot, cluster), refused_by_slurm(asked):
            made = executor(settings, chosen, memory, folder, job_name(stages, directory), cluster, directory.snapshot)
            # In this process ("debug") the code that was copied runs from where it was copied from.
            job = made.submit(
                run_job, str(directory.path), stages, str(directory.snapshot) if cluster != "debug" else None
            )
    except UserError:
        backup.restore()
        raise
    remember_job(directory, stages, cluster, job, profile if isinstance(profile, str) else None)
    if cluster != "slurm":
        return job
    from tango_hpc.commands.handle import RunJob

    return RunJob(folder, job.job_id, directory.path)


def was_stopped(config: Config) -> bool:
    """Return whether the last attempt of the run saved and stopped."""
    return [attempt.code for attempt in AttemptLog(RunDirectory(config.run.dir)).read()][-1:] == [
        StoppedEarly.exit_code
    ]


def script(stages: str, config: Config, profile: Profile) -> str:
    """Return the sbatch script that `submit` hands to Slurm."""
    from submitit.slurm.slurm import _make_sbatch_string

    memory = node_memory([config], stages_named(stages), profile)
    directory = RunDirectory(config.run.dir)
    folder = directory.submitit_logs
    parameters = slurm_parameters(config, profile, memory, job_name(stages, directory), directory.snapshot)
    command = f"{batch_python(profile)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return _make_sbatch_string(command=command, folder=folder, **parameters)


def executor(
    config: Config, profile: Profile, memory: Memory, folder: Path, name: str, cluster: Cluster, snapshot: Path
) -> Any:
    """Return submitit's executor with all that the profile and the config ask for."""
    import submitit

    class Executor(submitit.SlurmExecutor):
        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            """Return the job that sbatch names in its own words: a cluster's notes may speak of jobs before."""
            text = string if isinstance(string, str) else string.decode(errors="replace")
            submitted = re.search(r"^Submitted batch job \d+", text, re.MULTILINE)
            return submitit.SlurmExecutor._get_job_id_from_submission_command(submitted[0] if submitted else text)

    if cluster == "slurm":
        made = Executor(folder, python=batch_python(profile))
        made.update_parameters(**slurm_parameters(config, profile, memory, name, snapshot))
        return made
    options = {}
    if cluster == "local":
        # setsid: it must outlive the terminal. submitit would give it the first GPUs of the machine.
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = f"env {shlex.quote(f'CUDA_VISIBLE_DEVICES={chosen}')} " if chosen is not None else ""
        options["local_python"] = f"{gpus}setsid {shlex.quote(sys.executable)} -P"
    made = submitit.AutoExecutor(folder, cluster=cluster, **options)
    num_gpus = config.launch.tasks_per_node if config.launch.device == "cuda" else 0
    made.update_parameters(name=name, timeout_min=NO_LIMIT_MINUTES, gpus_per_node=num_gpus, stderr_to_stdout=True)
    return made


def batch_python(profile: Profile) -> str:
    """Return the Python of the supervisor, for bash.

    exec: it becomes the batch process, which Slurm's signals reach. -P: the package of the snapshot, not one that the
    working directory may hold.
    """
    in_environment = profile.venv is not None or profile.conda is not None
    return f"exec {'python' if in_environment else shlex.quote(sys.executable)} -P"


def slurm_parameters(config: Config, profile: Profile, memory: Memory, name: str, snapshot: Path) -> dict[str, Any]:
    """Return the parameters of submitit's Slurm executor."""
    setup = [
        slurm.BATCH_MARK_LINE,
        *([f"export {CHAIN}=1"] if profile.requeue == "chain" else []),
        "trap '' USR2  # a near time limit may be announced before Python listens",
        *setup_lines(profile, snapshot / PRIVATE_VARIABLES),
        f'export PYTHONPATH={shlex.quote(str(snapshot))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
    ]
    return {
        "job_name": name,
        "time": time_limit_minutes(profile.time),
        "use_srun": False,  # the supervisor starts srun itself, once it listens for signals
        "stderr_to_stdout": True,
        "wckey": None,
        "setup": setup,
        "additional_parameters": sbatch_options(config, profile, memory),
    }


def sbatch_options(config: Config, profile: Profile, memory: Memory) -> dict[str, str | int | bool]:
    """Return sbatch's options by their long names; `True` for those without a value."""
    launch = config.launch
    options: dict[str, str | int | bool | None] = {
        # Here and not as submitit's own parameters: to submitit the supervisor is the only task.
        "nodes": launch.nodes,
        "ntasks-per-node": launch.tasks_per_node,
        "cpus-per-task": cpus_per_rank(config, profile),
        "chdir": os.getcwd(),
        # B: to the supervisor only. Slurm may send it up to a minute early.
        "signal": f"B:USR2@{int(launch.grace_seconds) + SIGNAL_AHEAD_SECONDS}",
        "account": profile.account,
        "partition": profile.partition,
        "qos": profile.qos,
        "reservation": profile.reservation,
        "constraint": profile.constraint,
        "exclude": profile.exclude,
        "mem": memory.option,
        "exclusive": profile.exclusive or None,
        "mail-user": profile.mail_user,
        "mail-type": profile.mail_type,
        "requeue" if profile.requeue is True else "no-requeue": True,
    }
    if launch.device == "cuda":
        # By node, where the cluster lets us: isolating each task's GPU breaks copies between the GPUs of a node. By
        # task
        # Slurm isolates each GPU unless srun, which takes the binding from the job, is asked for none.
        by_task = profile.gpu_request == "gpus-per-task"
        options["gpu-bind"] = "none" if by_task else None
        num_gpus = 1 if by_task else launch.tasks_per_node
        count = f"{profile.gpu_type}:{num_gpus}" if profile.gpu_type else num_gpus
        options[profile.gpu_request] = f"gpu:{count}" if profile.gpu_request == "gres" else count
    return {key: value for key, value in (options | profile.sbatch).items() if value is not None and value is not False}


@contextmanager
def refused_by_slurm(asked: str) -> Iterator[None]:
    """Turn a refused submission into a `UserError` with sbatch's own words, and what was `asked` of each node if that
    is it.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with redirect_stderr(io.StringIO()):  # submitit copies there what the error will say
            yield
    except (FailedJobError, FailedSubmissionError) as error:
        text = str(error).strip()
        if re.search(r"node configuration|memory|cpu", text, re.IGNORECASE):
            text += f"\nEach node was asked for {asked}; cpus_per_rank and memory of the profile change that"
        raise UserError(f"Slurm refused the job: {text}") from None


@contextmanager
def job_environment(profile: Profile, snapshot: Path, cluster: Cluster) -> Iterator[None]:
    """Set this process's environment to what the job inherits, for the time of the block.

    A local job gets the variables of the profile. A Slurm job gets none that describe the job or step in which the
    submission is typed (`srun --pty bash`, say): sbatch hands on those that it does not set itself, and the new job
    would take itself for a task of a step.
    """
    before = dict(os.environ)
    if cluster == "slurm":
        _set_environment(slurm.without_job(before))
    else:
        os.environ.update(variables_here(profile) | {"PYTHONPATH": python_path(snapshot)})
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def take_job_files(profile: Profile, snapshot: Path, configs: Sequence[Config] = ()) -> Path:
    """Put what a job takes along into the folder `snapshot`: the code, and the variables of the profile's `env`.

    The code comes with its uncommitted changes where all the runs that share it, those of `configs`, record them.
    """
    take_snapshot(snapshot, record_diff=bool(configs) and all(config.run.record_diff for config in configs))
    file = snapshot / PRIVATE_VARIABLES
    file.unlink(missing_ok=True)
    if profile.env:
        write_for_owner(file, "".join(f"{line}\n" for line in export_lines(profile.env)))
    return snapshot


def check_submission(config: Config, profile: Profile, cluster: Cluster) -> None:
    """Raise UserError for what stands against a submission beside the rules of `prepare_run`; makes nothing."""
    check_cluster(cluster)
    check_log_folder(config.run.dir)
    check_time(config, profile)
    check_nobody_runs(RunDirectory(config.run.dir))


def check_time(config: Config, profile: Profile) -> None:
    """Raise UserError where an attempt would be told to stop as soon as it starts."""
    if time_limit_minutes(profile.time) * 60 <= config.launch.grace_seconds + SIGNAL_AHEAD_SECONDS:
        raise UserError(
            f"the profile's time {profile.time} leaves nothing beside launch.grace_seconds="
            f"{config.launch.grace_seconds:.0f}; ask for more time, or lower the grace"
        )


def check_log_folder(path: Path) -> None:
    """Raise UserError where Slurm would write a job's log elsewhere than below `path`."""
    if "%" in str(path):
        raise UserError(f"{path} holds a %, which Slurm replaces in names of log files; choose another directory")


def check_cluster(cluster: Cluster) -> None:
    """Raise UserError where the cluster's commands are missing."""
    if cluster == "slurm" and not slurm.is_available():
        raise UserError(
            "sbatch was not found: this machine cannot submit to Slurm. Go to a login node (or `module load slurm`), "
            "or use --cluster local to run in the background here"
        )


def check_nobody_runs(directory: RunDirectory) -> None:
    """Raise UserError where a job of this run waits or runs, or may do so, or a process of this machine has it."""
    try:
        check_lock(directory)
    except slurm.NoAnswer as error:
        raise UserError(
            f"whether a job runs in {directory.path} is not known, so nothing was started; try again later. {error}"
        ) from None
    check_no_job_waits(directory)


def job_name(stages: str, directory: RunDirectory) -> str:
    """Return the name that squeue shows."""
    return f"{stages}-{directory.path.name}"


def node_local_paths(config: Config) -> list[str]:
    """Return keys of the config's files and folders that lie where usually every node has a disk of its own."""
    named = {"run.dir": config.run.dir, "data.train": config.data.train, "data.eval": config.data.eval}
    named |= {f"{name}.model.path": role.model.path for name, role in config.models.items()}
    return [key for key, path in named.items() if is_node_local(path)]


def is_node_local(path: Path) -> bool:
    """Return whether `path` lies in a folder that is each node's own, by its name."""
    return any(path.resolve().is_relative_to(folder) for folder in NODE_LOCAL)
