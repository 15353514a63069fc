"""Check of this machine's NVIDIA driver against the installed torch, which is not imported.

The least driver for a CUDA version is that of NVIDIA's "minor version compatibility"
(docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1): all of CUDA 13 runs from driver
580 on, all of CUDA 12 from 525. Below it `torch.cuda.is_available()` is false and nothing else is said.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PROC_FILE = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
ASK_FOR_GPUS = "ask for GPUs (gpu_request in the profile), or set launch.device=cpu"
# vLLM's default wheels are for CUDA 13; those for CUDA 12.9 lie on its releases' pages, and torch's on an index of its
# own. 0.30.0 is the newest of them that takes torch 2.13.
_RELEASE = "https://github.com/vllm-project/vllm/releases/download/v0.30.0/vllm-0.30.0+cu129-cp38-abi3-manylinux_2_28"
CUDA_12 = (
    "install the CUDA 12 builds of torch and vLLM (2.13.0+cu129 and 0.30.0+cu129) into a new environment: "
    f"pip install '.[gpu]' {_RELEASE}_{platform.machine()}.whl --extra-index-url https://download.pytorch.org/whl/cu129"
)


@dataclass(frozen=True)
class GpuSoftware:
    """The software for GPUs on this machine: `driver` as in 570.148.08, None without one; `cuda` that torch is for,
    None for the CPU.
    """

    driver: str | None
    cuda: str | None

    def problem(self) -> tuple[str, str] | None:
        """Return why torch can use no GPU here and the way out, None where driver and torch fit each other."""
        if self.cuda is None:
            return (
                "the installed torch is a CPU build",
                "pip install '.[gpu]', in the folder of tango_hpc, into a new environment, or set launch.device=cpu",
            )
        if self.driver is None:
            return "there is no NVIDIA driver here", ASK_FOR_GPUS
        release, least = int(self.driver.split(".")[0]), self.least_driver(self.cuda)
        if release >= least:
            return None
        newer = f"ask the cluster's staff for driver {least} or newer"
        can_take_cuda_12 = LEAST_DRIVER[12] <= release < LEAST_DRIVER[13]
        return (
            f"the NVIDIA driver is {self.driver}, and torch for CUDA {self.cuda} needs {least} or newer",
            f"{newer}, or {CUDA_12}" if can_take_cuda_12 else newer,
        )

    @staticmethod
    def least_driver(cuda: str) -> int:
        """Return the oldest driver release that runs programs made with this CUDA version."""
        major = int(cuda.split(".")[0])
        return LEAST_DRIVER.get(major, max(LEAST_DRIVER.values()))


def gpu_software() -> GpuSoftware:
    """Return the GPU software that is installed on this machine."""
    return GpuSoftware(_driver(), _cuda_of_torch())


def why_no_gpu() -> str:
    """Return why `torch.cuda.is_available()` is false here, with the way out."""
    what, way_out = gpu_software().problem() or ("driver and torch fit, but no GPU is visible", ASK_FOR_GPUS)
    return f"{what}; {way_out}"


def why_not_shared(num_processes: int) -> tuple[str, str] | None:
    """Return why so many processes cannot use each GPU that is visible here and the way out; None where they can.

    That is its compute mode, which some sites set to one process a GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=index,compute_mode", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    modes = dict(re.findall(r"^(\d+), *(\w+)$", done.stdout, re.MULTILINE)) if done.returncode == 0 else {}
    refusing = {"Prohibited"} | ({"Exclusive_Process", "Exclusive_Thread"} if num_processes > 1 else set())
    found = [f"{mode} (GPU {index})" for index, mode in modes.items() if mode in refusing]
    if not found:
        return None
    share = "generator and verifier, a process each, share every GPU" if num_processes > 1 else "no process may use it"
    ask = (
        "ask the cluster's staff for compute mode Default (nvidia-smi -c 0; at some sites an option of the job,"
        " such as "
    )
    alone = ", or train without a verifier (verifier=null)" if num_processes > 1 else ""
    return f"compute mode {', '.join(found)}: {share}", f"{ask}--gpu_cmode=shared){alone}"


def _driver() -> str | None:
    """Return the release of the loaded kernel module; where /proc does not show it (WSL, some containers), what
    nvidia-smi says.
    """
    if PROC_FILE.is_file():
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", PROC_FILE.read_text())
        if found:
            return found.group(1)
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = re.match(r"\d+(?:\.\d+)+", done.stdout) if done.returncode == 0 else None
    return found.group() if found else None


def _cuda_of_torch() -> str | None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return found.group(1) if found else None
