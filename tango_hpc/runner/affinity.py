"""Keep a process on the CPUs next to its GPU.

A page of host memory lies on the NUMA node of the CPU that first writes to the page. Weights and optimizer, which move
between a GPU and the host all the time, should lie on the GPU's own node: from another one each copy crosses the link
between the sockets.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def stay_near_gpu(local_rank: int, num_threads: int, root: Path = Path("/")) -> None:
    """Bind this process, and all that it starts from now on, to those of its CPUs that are next to its GPU.

    Call this before anything pins host memory. A process with fewer such CPUs than `num_threads` keeps all of its CPUs.
    The log says what was done. Without a GPU nothing is done: the rank ends with the reason soon afterwards.
    """
    bus_id = gpu_bus_id(local_rank)
    if bus_id is None:
        return
    file = root / "sys/bus/pci/devices" / bus_id / "local_cpulist"
    near = parse_cpus(file.read_text()) if file.is_file() else set()
    own = os.sched_getaffinity(0)
    chosen = own & near
    if own <= near:
        print(f"All {len(own)} CPUs of this process are next to its GPU {bus_id}.", flush=True)
    elif len(chosen) >= num_threads:
        os.sched_setaffinity(0, chosen)
        print(f"This process keeps to {len(chosen)} of its {len(own)} CPUs, next to its GPU {bus_id}.", flush=True)
    else:
        print(
            f"This process keeps all of its {len(own)} CPUs, of which {len(chosen)} are next to its GPU {bus_id} "
            f"({file}): it has {num_threads} threads. Copies between GPU and host may be slower. In a Slurm job "
            "exclusive: true or a larger cpus_per_rank in the profile gives more CPUs.",
            flush=True,
        )


def gpu_bus_id(local_rank: int) -> str | None:
    """Return the PCI address of a rank's GPU as /sys spells it, or None where the rank has no GPU.

    The CUDA driver answers, and counts GPUs as torch does: it heeds CUDA_VISIBLE_DEVICES (numbers, UUIDs, MIG slices)
    and the control group. A rank that sees a single GPU has that one.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, address = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    index = 0 if count.value == 1 else local_rank
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    if driver.cuDeviceGetPCIBusId(address, len(address), device) != 0:
        return None
    return address.value.decode().lower()


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-15,64-79, the format of Linux's cpulist files."""
    ranges = [item.split("-") for item in text.strip().split(",") if item]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
