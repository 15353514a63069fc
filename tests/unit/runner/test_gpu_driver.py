"""Driver and torch that do not fit each other are named, with the way out; ranks that should use GPUs must be
on NCCL.
"""

from __future__ import annotations

import os
import platform
import socket
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tango_hpc.base.config import config_to_yaml
from tango_hpc.base.errors import NodeFailed, UserError
from tango_hpc.base.run.worker import Worker
from tango_hpc.commands import doctor, doctor_ranks
from tango_hpc.models.parallel.ranks import check_cards
from tango_hpc.runner import gpu_driver
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.gpu_driver import GpuSoftware, gpu_software, why_no_gpu, why_not_shared
from tango_hpc.stages.rank import run_stage
from tango_hpc.stages.stage import SFT, TRAIN
from tests.slurm.jobs import counting_config

# First lines of /proc/driver/nvidia/version, of the proprietary and of the open kernel module.
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.148.08  Thu May  8 20:28:33 UTC 2025\n"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3)  Tue Sep"
    " 23\n"
)
COMPILER = "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets up what this machine has."""

    def set_up(*, module: str = "", smi: str = "", cuda: str | None = "13.0") -> None:
        proc = tmp_path / "version"
        if module:
            proc.write_text(module + COMPILER)
        monkeypatch.setattr(gpu_driver, "PROC_FILE", proc)
        (tmp_path / "bin").mkdir()
        if smi:
            (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(
            f"from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] ="
            " None\n"
        )
        spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch" / "__init__.py"))
        monkeypatch.setattr(gpu_driver, "find_spec", lambda name: spec if name == "torch" else None)

    return set_up


def test_the_installed_torch_is_read_as_it_describes_itself() -> None:
    import torch

    assert gpu_software().cuda == torch.version.cuda


@pytest.mark.parametrize(("module", "version"), [(PROPRIETARY, "570.148.08"), (OPEN, "580.95.05")])
def test_the_driver_is_that_of_the_kernel_module(machine: Any, module: str, version: str) -> None:
    machine(module=module, smi="echo 1.2.3")
    assert gpu_software() == GpuSoftware(version, "13.0")


def test_else_that_of_nvidia_smi(machine: Any) -> None:
    machine(smi="echo 535.161.07; echo 535.161.07")
    assert gpu_software().driver == "535.161.07"


def test_a_broken_nvidia_smi_gives_none(machine: Any) -> None:
    machine(smi="echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")
    assert gpu_software().driver is None


def test_an_old_driver_is_named_with_the_one_needed_and_the_cuda_12_builds(machine: Any) -> None:
    machine(module=PROPRIETARY)
    text = why_no_gpu()
    assert "the NVIDIA driver is 570.148.08, and torch for CUDA 13.0 needs 580 or newer" in text
    assert "2.13.0+cu129 and 0.30.0+cu129" in text
    assert "vllm-0.30.0+cu129-cp38-abi3-manylinux_2_28_" in text
    assert "--extra-index-url https://download.pytorch.org/whl/cu129" in text


def test_the_page_on_clusters_gives_the_same_command() -> None:
    page = (Path(__file__).parents[3] / "docs/on_your_cluster.md").read_text().replace("\\\n    ", "")
    command = gpu_driver.CUDA_12.partition("pip install ")[2].replace(platform.machine(), "x86_64")
    assert f"pip install -e {command}" in page


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"),
    [
        ("580.65.06", "13.0", True), ("580.65.06", "13.2", True), ("590.10", "12.9", True), ("525.60.13", "12.9", True),
        ("579.99", "13.0", False), ("520.61.05", "12.6", False), ("450.51.05", "11.8", True), ("590.10", "14.0", True),
    ],
)  # fmt: skip
def test_minor_versions_of_cuda_are_compatible(driver: str, cuda: str, fits: bool) -> None:
    assert (GpuSoftware(driver, cuda).problem() is None) == fits


def test_the_cuda_12_builds_are_no_way_out_for_a_driver_that_is_too_old_for_them_or_for_themselves() -> None:
    for old in (GpuSoftware("470.82.01", "13.0"), GpuSoftware("470.82.01", "12.9")):
        problem = old.problem()
        assert problem is not None and "cu129" not in problem[1] and "driver" in problem[1]


def test_no_driver_and_a_cpu_build_are_told_apart(machine: Any) -> None:
    machine()
    assert why_no_gpu() == f"there is no NVIDIA driver here; {gpu_driver.ASK_FOR_GPUS}"
    assert "the installed torch is a CPU build; pip install" in "; ".join(
        GpuSoftware("580.95.05", None).problem() or ()
    )


def test_the_start_of_a_run_on_gpus_says_it(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(module=PROPRIETARY)
    config = counting_config(tmp_path, "run", {"device": "cuda", "nodes": 1})
    directory, _ = enter_run(config.run.dir, config_to_yaml(config), resume=False, stage="train")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {"HF_HUB_OFFLINE": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NodeFailed, match=r"this rank has no GPU: the NVIDIA driver is 570.148.08, .*needs 580.*cu129"):
        stop: Any = SimpleNamespace(heart=SimpleNamespace(enter=lambda what: None))
        run_stage(directory, config, TRAIN, ["generator"], Worker(0, "generator"), stop)


def test_doctor_notes_the_driver_and_fails_where_ranks_did_not_come_up_on_nccl(machine: Any, tmp_path: Path) -> None:
    machine(module=PROPRIETARY, smi="echo 'NVIDIA H200, 570.148.08, 143771 MiB, 0 MiB'")
    card, driver = doctor._gpu(None)
    assert card.level == "ok" and "H200" in card.text
    assert driver.level == "warn" and "570.148.08" in driver.text and "580" in driver.text and "cu129" in driver.remedy
    on_gpu, on_cpu = [{"backend": backend, "no_gpu": why_no_gpu(), "gpu_refuses": None} for backend in ("NCCL", "Gloo")]
    (finding,) = doctor_ranks._backend([on_cpu | {"node": "n1"}] * 2, wants_gpus=True)
    assert finding.level == "fail" and "came up on Gloo" in finding.text and "570.148.08" in finding.remedy
    found = [on_gpu | {"node": "n1"}, on_cpu | {"node": "n2"}]
    (finding,) = doctor_ranks._backend(found, wants_gpus=True)
    assert finding.level == "fail" and "came up on Gloo on n2" in finding.text
    silent = {"node": "n2", "error": "no answer", "gpu_refuses": None}
    assert list(doctor_ranks._backend([found[0], silent], wants_gpus=True)) == []
    assert list(doctor_ranks._backend([found[1]], wants_gpus=False)) == []


def test_on_a_login_node_without_a_driver_doctor_waits_for_what_the_ranks_say(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`salloc COMMAND` runs it there, with the variables of the job but those of none of its nodes."""
    machine()
    config = counting_config(tmp_path, "run", {"device": "cuda", "nodes": 1})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert [finding.level for finding in doctor._gpu(config)] == ["warn"]
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert [finding.level for finding in doctor._gpu(config)] == ["fail"]


SHARED = (
    "compute mode Exclusive_Process (GPU 0), Exclusive_Process (GPU 1)",
    "Default",
    "nvidia-smi -c 0",
    "verifier=null",
)


@pytest.mark.parametrize(
    ("modes", "roles", "said"),
    [
        (["Exclusive_Process", "Exclusive_Process"], 2, SHARED),
        (["Default", "Exclusive_Process"], 2, ("compute mode Exclusive_Process (GPU 1): generator and verifier",)),
        (["Prohibited"], 2, ("compute mode Prohibited (GPU 0)", "--gpu_cmode=shared")),
        (["Prohibited"], 1, ("compute mode Prohibited (GPU 0): no process may use it", "nvidia-smi -c 0")),
        (["Exclusive_Process"], 1, None),
        (["Default", "Default"], 2, None),
    ],
)
def test_doctor_fails_where_the_roles_may_not_share_a_gpu(
    machine: Any, tmp_path: Path, modes: list[str], roles: int, said: tuple[str, ...] | None
) -> None:
    lines = "; ".join(f"echo '{index}, {mode}'" for index, mode in enumerate(modes))
    machine(module=OPEN, smi=f'case "$*" in *index,compute_mode*) {lines};; *) echo NVIDIA H200;; esac')
    rank = {"node": "n1", "backend": "NCCL", "gpu_refuses": why_not_shared(roles)}
    failures = list(doctor_ranks._backend([rank], wants_gpus=True))
    if said is None:
        assert failures == []
        return
    (failure,) = failures
    for part in said:
        assert part in f"{failure.text} {failure.remedy}"


def test_on_a_cpu_compute_modes_do_not_matter(machine: Any) -> None:
    machine(module=OPEN, smi='case "$*" in *index,compute_mode*) echo "0, Prohibited";; *) echo NVIDIA H200;; esac')
    rank = {"node": "n1", "backend": "Gloo", "no_gpu": "", "gpu_refuses": why_not_shared(1)}
    assert rank["gpu_refuses"] and not list(doctor_ranks._backend([rank], wants_gpus=False))


def test_a_compute_mode_that_cannot_be_asked_for_is_no_failure(machine: Any) -> None:
    machine(module=OPEN, smi="echo 'Field \"compute_mode\" is not a valid field to query.'; exit 2")
    assert why_not_shared(2) is None


def test_doctor_is_content_with_a_driver_that_serves(machine: Any) -> None:
    machine(module=OPEN)
    (finding,) = doctor._gpu(None)
    assert (finding.level, finding.text) == ("ok", "driver 580.95.05 serves torch for CUDA 13.0")


@pytest.mark.parametrize(
    ("device", "module", "fails"), [("cuda", "", True), ("cpu", OPEN, False), (None, OPEN, True), (None, "", False)]
)
def test_doctors_ranks_on_a_cpu_fail_where_gpus_were_meant(
    machine: Any, tmp_path: Path, device: str | None, module: str, fails: bool
) -> None:
    """Real ranks, which come up on Gloo here; without a config, a machine with a driver and torch for it means GPUs."""
    machine(module=module)
    launch = {"nodes": 1, "tasks_per_node": 1}
    config = None if device is None else counting_config(tmp_path, "run", launch | {"device": device})
    failed = [
        finding.text
        for finding in doctor_ranks.compare_ranks(config, tmp_path, {}, [SFT, TRAIN])
        if finding.level == "fail"
    ]
    assert failed == ([f"the ranks are to use GPUs, but came up on Gloo on {socket.gethostname()}"] if fails else [])


def test_doctor_gets_on_without_a_home_directory(tmp_path: Path) -> None:
    findings = list(doctor._storage(tmp_path))
    assert findings[0].level in ("ok", "fail") and str(tmp_path) in findings[0].text
    assert findings[-1].level == "warn" and "not writable, and caches go there" in findings[-1].text


def test_every_rank_has_a_gpu_of_its_own_and_all_are_of_one_kind() -> None:
    check_cards([("GPU-1", "NVIDIA A100"), ("GPU-2", "NVIDIA A100")])
    with pytest.raises(UserError, match=r"ranks 0 and 1 were given the same GPU \(GPU-1\)"):
        check_cards([("GPU-1", "NVIDIA A100"), ("GPU-1", "NVIDIA A100")])
    kinds = r"different kinds of GPU: NVIDIA A100 \(rank 0\), NVIDIA H100 \(rank 2\); ask for one of them, by gpu_type"
    with pytest.raises(UserError, match=kinds):
        check_cards([("GPU-1", "NVIDIA A100"), ("GPU-2", "NVIDIA A100"), ("GPU-3", "NVIDIA H100")])
