"""Host memory of this machine, and of this job's part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath


def memory_of_this_job(env: Mapping[str, str] = os.environ) -> float:
    """Return GiB that this machine may use, or as much of it as Slurm has given to the job."""
    limits = [memory_of_this_machine()]
    for mb, units in (("NODE", None), ("CPU", "SLURM_CPUS_ON_NODE"), ("GPU", "SLURM_GPUS_ON_NODE")):
        given, count = env.get(f"SLURM_MEM_PER_{mb}", ""), env.get(units, "") if units else "1"
        if given.isdigit() and count.isdigit() and int(given) * int(count):
            limits.append(int(given) * int(count) / 1024)
    return min(limits)


def memory_of_this_machine(root: Path = Path("/")) -> float:
    """Return GiB that this machine, or the control group that this process is in, may use."""
    limits = [host_memory_bytes(root)]
    for file in _limits_of_groups(root):
        if file.is_file() and file.read_text().strip().isdigit():
            limits.append(int(file.read_text()))
    return min(limits) / 2**30


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the CPUs of this machine have beside them.

    On Grace-Hopper the memory of each GPU is a NUMA node too, one without CPUs, and MemTotal counts it. What a run
    keeps on the host must fit into the memory of the CPUs.
    """
    total = _total_bytes(root / "proc/meminfo")
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    beside_cpus = [_total_bytes(node / "meminfo") for node in nodes if (node / "cpulist").read_text().strip()]
    return min(total, sum(beside_cpus)) if beside_cpus else total


def _total_bytes(meminfo: Path) -> int:
    """Return MemTotal of a machine's or a NUMA node's meminfo."""
    return next(int(line.split()[-2]) * 1024 for line in meminfo.read_text().splitlines() if "MemTotal:" in line)


def _limits_of_groups(root: Path) -> Iterator[Path]:
    """Yield where the control groups that this process is in may have their limit, of versions 2 and 1: each holds."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ["0::/", "1:memory:/"]:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        for path in (PurePosixPath(group), *PurePosixPath(group).parents):
            yield root / "sys/fs/cgroup" / folder / str(path).lstrip("/") / name
