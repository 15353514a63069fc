"""The part of `tango doctor` that starts a probe on every rank, as a run would, and compares what the ranks saw."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tango_hpc.base.config import Config
from tango_hpc.commands.findings import Finding
from tango_hpc.runner import slurm
from tango_hpc.runner.environment import free_port, place, python_path
from tango_hpc.runner.gpu_driver import gpu_software
from tango_hpc.runner.starters import CODE_ROOT
from tango_hpc.stages.stage import Stage

PROBE_SECONDS = 180.0
MAX_SKEW_SECONDS = 2.0
MIN_FREE_GB = 5.0
SHOW_ALL_GPUS = (
    "every rank must see all GPUs of its node: ask for them by --gpus-per-node, or add --gpu-bind=none to"
    " --gpus-per-task, as gpu_request: gpus-per-task of a profile does"
)


def compare_ranks(
    config: Config | None, storage: Path, variables: dict[str, str], stages: Sequence[Stage]
) -> Iterator[Finding]:
    """Start a probe on every rank, as a run would, and compare what they saw."""
    existing = next(folder for folder in (storage, *storage.parents) if folder.is_dir())
    with tempfile.TemporaryDirectory(dir=existing, prefix=".tango-doctor-") as folder:
        num_processes = 1 if config is None else max(len(stage.roles(config)) for stage in stages)
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
    """Return a finding where the allocation has fewer nodes than the config, or too few tasks to start the ranks."""
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
    words = [sys.executable, "-P", "-m", "tango_hpc.commands.probe", str(folder), str(num_processes)]
    (folder / "control").mkdir()
    env = os.environ | variables | {"PYTHONPATH": python_path(CODE_ROOT)}
    if "SLURM_JOB_ID" in os.environ and not slurm.in_step() and shutil.which("srun"):
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        per_node = config.launch.tasks_per_node if config is not None else 1
        counts = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
        options = [*counts, "--overlap", "--distribution=block:block"]
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
    """Check that the ranks of a GPU run use NCCL, not Gloo, on GPUs that work."""
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
            error = " ".join(line.strip() for line in probe["error"].splitlines()[:5])
            yield Finding("fail", f"rank {probe['rank']} on {probe['node']}: {error}", _way_out(probe))
    yield from _inside_nodes(found)
    good = [probe for probe in found if "all_reduce_seconds" in probe]
    if not good:
        return
    wrong = [probe["rank"] for probe in good if not probe["all_reduce_right"]]
    slowest = max(probe["all_reduce_seconds"] for probe in good)
    nodes = sorted({probe["node"] for probe in good})
    yield Finding(
        "fail" if wrong else "ok",
        f"{good[0]['backend']} all-reduce of 64 MB over {len(good)} ranks on {', '.join(nodes)}:"
        f" {1000 * slowest:.0f} ms" + (f", wrong sums on ranks {wrong}" if wrong else ""),
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


def _way_out(probe: Mapping[str, Any]) -> str:
    """Return what may mend a rank's error: two GPUs of one node meet over NVLink or PCIe, other ranks over a
    network.
    """
    if "pair" in probe and "pair_seconds" not in probe and probe["backend"] == "NCCL":
        return f"{SHOW_ALL_GPUS}; NCCL_DEBUG=INFO (env in the profile) names the two GPUs and what failed between them"
    return (
        "name the interface that the nodes share as socket_interface in the profile; up there:"
        f" {', '.join(probe['interfaces'])}"
    )


def _inside_nodes(found: list[dict[str, Any]]) -> Iterator[Finding]:
    """Tell how the first two ranks of each node reached each other."""
    pairs = [probe for probe in found if "pair_seconds" in probe]
    if pairs:
        wrong = sorted({probe["node"] for probe in pairs if not probe["pair_right"]})
        slowest = max(pairs, key=lambda probe: probe["pair_seconds"])
        yield Finding(
            "fail" if wrong else "ok",
            f"{slowest['backend']} all-reduce of 64 MB between two ranks of a node: at most "
            f"{1000 * slowest['pair_seconds']:.0f} ms ({slowest['node']})"
            + (f", wrong sums on {', '.join(wrong)}" if wrong else ""),
        )
    alone = sorted({probe["node"] for probe in found if probe.get("sees_one_gpu")})
    if alone:
        text = (
            f"each rank sees its own GPU alone on {', '.join(alone)}: GPUs of a node may not reach each other's memory"
        )
        yield Finding("warn", text, SHOW_ALL_GPUS)
