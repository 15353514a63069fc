"""Host memory is that of the CPUs, also where a GPU's memory is a NUMA node."""

from __future__ import annotations

import re
from pathlib import Path

from tango_hpc.plan.host import host_memory_bytes, memory_of_this_machine

ROOT = Path(__file__).parents[3]
GIB = 2**30


def machine(root: Path, nodes: dict[int, tuple[str, int]]) -> Path:
    """A /proc and /sys below `root` with a NUMA node for each number: its CPUs and GiB."""
    lines = f"MemTotal:       {sum(gib for _, gib in nodes.values()) * 2**20} kB\nMemFree:        1024 kB\n"
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(lines)
    for number, (cpus, gib) in nodes.items():
        folder = root / "sys/devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {gib * 2**20} kB\nNode {number} MemFree: 1 kB\n"
        )
    (root / "sys/devices/system/node/possible").write_text("0-35\n")
    return root


def test_memory_of_a_grace_hopper_node_is_that_of_its_cpus(tmp_path: Path) -> None:
    """Four GH200: each GPU's 96 GiB are a node without CPUs; nodes that MIG may use are there and empty."""
    grace = {index: (f"{72 * index}-{72 * index + 71}", 120) for index in range(4)}
    hopper = {4 + 8 * index: ("", 96) for index in range(4)}
    empty = {number: ("", 0) for number in (5, 6, 7, 13)}
    root = machine(tmp_path, grace | hopper | empty)
    assert host_memory_bytes(root) == 480 * GIB and memory_of_this_machine(root) == 480
    group = root / "sys/fs/cgroup/memory.max"
    group.parent.mkdir(parents=True)
    group.write_text(f"{100 * GIB}\n")
    assert host_memory_bytes(root) == 480 * GIB and memory_of_this_machine(root) == 100


def test_memory_of_other_machines_is_all_of_it(tmp_path: Path) -> None:
    assert host_memory_bytes(machine(tmp_path / "sockets", {0: ("0-31", 256), 1: ("32-63", 256)})) == 512 * GIB
    (tmp_path / "old/proc").mkdir(parents=True)  # a kernel without NUMA
    (tmp_path / "old/proc/meminfo").write_text("MemTotal: 1048576 kB\n")
    assert host_memory_bytes(tmp_path / "old") == GIB
    here = int(re.findall(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    assert 0 < host_memory_bytes() <= here


def test_one_file_asks_the_system_for_host_memory() -> None:
    asks = re.compile(r"MemTotal|SC_PHYS_PAGES|psutil")
    files = {str(file.relative_to(ROOT)) for file in ROOT.glob("tango_hpc/**/*.py") if asks.search(file.read_text())}
    assert files == {"tango_hpc/plan/host.py"}
