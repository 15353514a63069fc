"""A task whose torch says that there is a GPU: `python -m tests.helpers.gpu_node RUN STAGE`.

The program is `tango_hpc.stages.rank`. Only torch's answers about GPUs are changed, as this machine has none. With
`CUDA_STARTED` in the environment, torch also says that CUDA was started before the fork.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tango_hpc.stages import rank

COMMAND = (sys.executable, "-P", "-m", "tests.helpers.gpu_node")
CUDA_STARTED = "TEST_CUDA_STARTED"


def add_flashinfer(folder: Path, code: str) -> str:
    """Write a package `flashinfer`, which Megatron-core imports where it is installed; the PYTHONPATH that finds it."""
    (folder / "packages").mkdir()
    (folder / "packages/flashinfer.py").write_text(code)
    return os.pathsep.join(filter(None, [str(folder / "packages"), os.environ.get("PYTHONPATH")]))


def main() -> int:
    """Be the task."""
    task = os.getpid()
    torch.cuda._device_count_nvml = lambda: 1  # type: ignore[attr-defined]
    torch.cuda.is_available = lambda: True
    if CUDA_STARTED in os.environ:
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != task  # type: ignore[attr-defined]
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
