"""`tango doctor` on what stops a run before it starts: the C library, and two GPUs of a node that do not reach each
other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tango_hpc.commands import doctor, doctor_ranks
from tango_hpc.commands.findings import Finding
from tango_hpc.runner.environment import free_port

ROOT = Path(__file__).parents[3]
PEER = (
    "NCCL error\nunhandled cuda error\nLast error:\nCuda failure 'peer access is not supported between these two"
    " devices'"
)

# Ranks 0 and 1 on a node n1, ranks 2 and 3 on n2. One rank may fail (`raise`) or die (`kill`) in an all-reduce of two.
PROBE = """
import os, signal, sys
import torch.distributed as dist
from tango_hpc.commands import probe
from tango_hpc.base.run.directory import RunDirectory

folder, rank, fails, how, error = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % 2), SLURMD_NODENAME=f"n{rank // 2 + 1}")
probe.PAIR_TIMEOUT_SECONDS, probe.ALL_REDUCE_MB = 15, 1
real = dist.all_reduce


def all_reduce(numbers, group=None):
    if rank == fails and dist.get_world_size(group) == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(error)
    return real(numbers, group=group)


dist.all_reduce = all_reduce
probe.probe(RunDirectory(folder), 1)
"""


def probe_ranks(folder: Path, fails: int, how: str = "raise") -> list[dict[str, Any]]:
    """What four real ranks over Gloo leave, of which rank `fails` (-1: none) does so."""
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROBE, str(folder), str(rank), str(fails), how, PEER],
            env=os.environ | place,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]
    for process in processes:
        process.wait(timeout=200)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("probe_*.json"))]


def compared(found: list[dict[str, Any]]) -> list[Finding]:
    return list(doctor_ranks._compare(found, interface_named=True))


def test_two_ranks_of_each_node_are_asked_first(tmp_path: Path) -> None:
    found = probe_ranks(tmp_path, fails=-1)
    assert [rank["pair"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(rank["pair_right"] and rank["all_reduce_right"] for rank in found)
    findings = compared(found)
    assert re.fullmatch(
        r"Gloo all-reduce of 64 MB between two ranks of a node: at most \d+ ms \(n[12]\)", findings[0].text
    )
    assert findings[1].text.startswith("Gloo all-reduce of 64 MB over 4 ranks on n1, n2: ")
    assert {finding.level for finding in findings[:2]} == {"ok"}
    wrong = [rank | {"pair_right": rank["node"] != "n2"} for rank in found]
    assert compared(wrong)[0].level == "fail" and compared(wrong)[0].text.endswith("wrong sums on n2")
    alone = [rank | {"sees_one_gpu": rank["node"] == "n1"} for rank in found]
    (note,) = [finding for finding in compared(alone) if "sees its own GPU alone on n1" in finding.text]
    assert note.level == "warn" and "--gpu-bind=none" in note.remedy


def test_the_node_whose_ranks_do_not_reach_each_other_is_named(tmp_path: Path) -> None:
    """Both ranks of the pair say so, no rank goes on to the all-reduce over all, and nobody waits for a minute."""
    found = [rank | {"backend": "NCCL"} for rank in probe_ranks(tmp_path, fails=3)]
    assert not any("all_reduce_seconds" in rank for rank in found)
    failures = [finding for finding in compared(found) if finding.level == "fail"]
    assert [failure.text[:58] for failure in failures] == [
        "rank 2 on n2: the all-reduce between ranks 2 and 3 failed:",
        "rank 3 on n2: the all-reduce between ranks 2 and 3 failed:",
    ]
    assert "peer access is not supported between these two devices" in failures[1].text
    for failure in failures:
        assert "--gpu-bind=none" in failure.remedy and "NCCL_DEBUG" in failure.remedy
    over_network = [finding.remedy for finding in compared([rank | {"backend": "Gloo"} for rank in found])]
    assert over_network[0].startswith("name the interface")


def test_a_rank_that_dies_there_has_said_where(tmp_path: Path) -> None:
    """As NCCL's watchdog ends a process whose all-reduce hangs."""
    found = probe_ranks(tmp_path, fails=1, how="kill")
    assert len(found) == 4
    assert found[1]["error"] == "no answer from the all-reduce between ranks 0 and 1"
    texts = [finding.text for finding in compared(found) if finding.level == "fail"]
    assert "rank 1 on n1: no answer from the all-reduce between ranks 0 and 1" in texts


def software(
    monkeypatch: pytest.MonkeyPatch, glibc: str, *, installed: bool, in_container: bool = False
) -> list[Finding]:
    monkeypatch.setattr(os, "confstr", lambda name: {"CS_GNU_LIBC_VERSION": glibc}[name])
    monkeypatch.setattr(doctor, "find_spec", lambda name: {"llguidance": object() if installed else None}[name])
    monkeypatch.setattr(doctor, "package_versions", lambda: dict.fromkeys(doctor.NEEDED, "1"))
    return [finding for finding in doctor._software(in_container=in_container) if finding.level == "fail"]


@pytest.mark.parametrize(
    ("glibc", "installed", "fails"),
    [
        ("glibc 2.28", False, True),
        ("glibc 2.30", False, True),
        ("glibc 2.31", False, False),
        ("glibc 2.28", True, False),
    ],
)
def test_doctor_names_a_c_library_that_is_too_old_before_pip_does(
    monkeypatch: pytest.MonkeyPatch, glibc: str, installed: bool, fails: bool
) -> None:
    findings = software(monkeypatch, glibc, installed=installed)
    assert findings[-1].text == "not installed: vllm"
    assert [finding.text for finding in findings[:-1]] == (
        [f"this machine has {glibc}, and llguidance, which vLLM requires, has wheels for glibc 2.31 and newer only"]
        if fails
        else []
    )
    if fails:
        assert "apptainer or pyxis" in findings[0].remedy and "conda" in findings[0].remedy


def test_ranks_in_a_container_have_their_own_c_library_and_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software(monkeypatch, "glibc 2.28", installed=False, in_container=True) == []


def test_the_c_library_of_the_installed_wheel_is_the_one_named() -> None:
    """When vLLM moves on to another llguidance, doctor and page follow."""
    (tag,) = re.findall(r"manylinux_(\d+)_(\d+)", metadata.distribution("llguidance").read_text("WHEEL") or "")
    assert tuple(map(int, tag)) == doctor.LEAST_GLIBC
    page = (ROOT / "docs/on_your_cluster.md").read_text()
    assert "glibc {}.{}".format(*tag) in page and "llguidance" in page
