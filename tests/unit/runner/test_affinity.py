"""A process with a GPU stays on the CPUs next to that GPU: a made-up topology, on this machine's own CPUs."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tango_hpc.base.config import config_to_yaml
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import RANKS_OF_TASK
from tango_hpc.runner import affinity
from tango_hpc.runner.affinity import gpu_bus_id, parse_cpus, stay_near_gpu
from tango_hpc.runner.enter import enter_run
from tango_hpc.runner.starters import SrunStarter
from tango_hpc.stages.stage import TRAIN
from tests.slurm.jobs import counting_config

CPUS = sorted(os.sched_getaffinity(0))
BUS_IDS = ["0000:1b:00.0", "0009:01:00.0"]

needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="a process of one CPU cannot be bound to fewer")

# Processes of a task, forked as `host_ranks` forks them, run a stage on a GPU of a machine with the topology of ROOT.
# They
# come as far as the question whether there is a GPU.
RUN_STAGE = """
import json, multiprocessing, os, subprocess, sys, threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from tango_hpc.stages import rank
from tango_hpc.stages.stage import TRAIN
from tango_hpc.base.config import load_config
from tango_hpc.base.errors import NodeFailed
from tango_hpc.runner import affinity
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import Worker

run, root, bus_ids = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
affinity.gpu_bus_id = lambda local_rank: bus_ids[local_rank]
real, seen = affinity.stay_near_gpu, {}


def stay_near_gpu(local_rank, num_threads):
    seen["torch"], seen["num_threads"] = "torch" in sys.modules, num_threads
    real(local_rank, num_threads, root)


def be(worker, results):
    rank.stay_near_gpu = stay_near_gpu
    directory = RunDirectory.open(run)
    stop = SimpleNamespace(heart=SimpleNamespace(enter=lambda what: None))
    try:
        rank.run_stage(directory, load_config(directory.config), TRAIN, ["generator", "verifier"], worker, stop)
    except NodeFailed as error:
        seen["error"] = str(error)
    import torch

    thread = threading.Thread(target=lambda: seen.update(thread=sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    words = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    seen["program"] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    results.put((str(worker), seen | {"cpus": sorted(os.sched_getaffinity(0)), "torch_threads": torch.get_num_threads()}))


context = multiprocessing.get_context("fork")
results = context.Queue()
workers = [Worker(number, role) for number in (0, 1) for role in ("generator", "verifier")]
processes = [context.Process(target=be, args=(worker, results)) for worker in workers]
for process in processes:
    process.start()
print(json.dumps(dict(results.get() for _ in workers)))
"""


def topology(root: Path, near: dict[str, str]) -> Path:
    """A /sys below `root` in which the GPU at each address is next to a list of CPUs."""
    for bus_id, cpus in near.items():
        folder = root / "sys/bus/pci/devices" / bus_id
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{cpus}\n")
    return root


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("71\n") == {71} and parse_cpus("\n") == set()


@needs_two_cpus
def test_all_processes_of_a_task_stay_near_their_own_gpus(tmp_path: Path) -> None:
    """Both ranks' two processes, before torch is imported; threads and programs of theirs stay there too."""
    root = topology(tmp_path / "root", {BUS_IDS[0]: f"{CPUS[0]},9000", BUS_IDS[1]: f"{CPUS[1]},9001-9063"})
    config = counting_config(tmp_path, "run", {"device": "cuda", "nodes": 1, "tasks_per_node": 2})
    directory, _ = enter_run(config.run.dir, config_to_yaml(config), resume=False, stage="train")
    place = {"RANK": "0", "LOCAL_RANK": "0", RANKS_OF_TASK: "2", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_STAGE, str(directory.path), str(root), json.dumps(BUS_IDS)],
        env=os.environ | place, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {worker: seen["cpus"] for worker, seen in found.items()} == {
        f"rank {rank} ({role})": [CPUS[rank]] for rank in (0, 1) for role in ("generator", "verifier")
    }
    for seen in found.values():
        assert not seen["torch"] and "this rank has no GPU" in seen["error"]
        assert seen["thread"] == seen["program"] == seen["cpus"]
        assert seen["num_threads"] == seen["torch_threads"] == 1
    assert done.stdout.count(f"keeps to 1 of its {len(CPUS)} CPUs, next to its GPU {BUS_IDS[1]}") == 2


def bind(tmp_path: Path, near: str | None, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return what a process of 16 CPUs binds itself to whose GPU is next to `near` (None: the system does not tell)."""
    bound: list[set[int]] = []
    monkeypatch.setattr(affinity, "gpu_bus_id", lambda local_rank: BUS_IDS[local_rank])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(set(cpus)))
    stay_near_gpu(1, num_threads, topology(tmp_path, {BUS_IDS[1]: near} if near is not None else {}))
    return bound


@pytest.mark.parametrize(
    ("near", "num_threads", "bound", "said"),
    [
        ("8-15,24-31", 8, [set(range(8, 16))], "keeps to 8 of its 16 CPUs, next to its GPU 0009:01:00.0"),
        ("0-63", 8, [], "All 16 CPUs of this process are next to its GPU 0009:01:00.0"),
        ("16-31", 8, [], "keeps all of its 16 CPUs, of which 0 are next to its GPU"),
        ("12-27", 8, [], "keeps all of its 16 CPUs, of which 4 are next to its GPU"),
        ("12-27", 4, [{12, 13, 14, 15}], "keeps to 4 of its 16 CPUs"),
        (None, 1, [], "local_cpulist): it has 1 threads"),
    ],
)
def test_a_process_leaves_its_cpus_only_where_its_threads_have_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    near: str | None,
    num_threads: int,
    bound: list[set[int]],
    said: str,
) -> None:
    assert bind(tmp_path, near, num_threads, monkeypatch) == bound
    assert said in capfd.readouterr().out


class Driver(SimpleNamespace):
    """A CUDA driver that shows the GPUs at these addresses; its functions take what C functions would."""

    def __init__(self, addresses: list[str], *, works: bool = True) -> None:
        integer, no_device, invalid = ctypes.POINTER(ctypes.c_int), 100, 101

        def count(answer: Any) -> int:
            answer[0] = len(addresses)
            return 0

        def get(answer: Any, index: int) -> int:
            answer[0] = 40 + index  # a handle, which is no index
            return 0 if index < len(addresses) else invalid

        def address(answer: int, size: int, device: int) -> int:
            text = addresses[device - 40].encode() + b"\0"
            ctypes.memmove(answer, text, min(len(text), size))
            return 0

        super().__init__(
            cuInit=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(lambda flags: 0 if works else no_device),
            cuDeviceGetCount=ctypes.CFUNCTYPE(ctypes.c_int, integer)(count),
            cuDeviceGet=ctypes.CFUNCTYPE(ctypes.c_int, integer, ctypes.c_int)(get),
            cuDeviceGetPCIBusId=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(address),
        )


def test_the_driver_tells_which_gpu_a_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(driver: Driver, local_rank: int) -> str | None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
        return gpu_bus_id(local_rank)

    two = Driver(["0000:1B:00.0", "0009:01:00.0"])  # as CUDA_VISIBLE_DEVICES names and orders them
    assert [asked(two, rank) for rank in (0, 1, 2)] == ["0000:1b:00.0", "0009:01:00.0", None]
    assert asked(Driver(["0000:CA:00.0"]), 3) == "0000:ca:00.0"  # Slurm shows each rank its own GPU alone
    assert asked(Driver([], works=False), 0) is None


def test_a_machine_without_a_driver_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    stay_near_gpu(0, 1)
    assert os.sched_getaffinity(0) == before


def test_srun_puts_neighbors_in_rank_on_one_socket(tmp_path: Path) -> None:
    config = counting_config(tmp_path, "run")
    assert "--distribution=block:block" in SrunStarter(RunDirectory(tmp_path), TRAIN, config).arguments()
