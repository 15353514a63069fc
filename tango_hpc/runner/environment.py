"""The place of this process (alone, in a Slurm allocation, a task of a step), and a rank's environment from Slurm's.

torch.distributed wants RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT. Slurm
gives the numbers. The address and port come from rank 0 through the run directory, which all nodes see anyway: only
one process asks Slurm's controller, and the port is free on the node that will listen on it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tango_hpc.base.config.schema import LaunchConfig
from tango_hpc.base.errors import NodeFailed, UserError
from tango_hpc.base.files import write_atomically
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.worker import RANKS_OF_TASK
from tango_hpc.runner import slurm
from tango_hpc.runner.polling import poll

Place = Literal["alone", "allocation", "rank"]

RENDEZVOUS_TIMEOUT_SECONDS = 300.0
NODE_ADDRESS_SECONDS = 200.0  # less than that, as rank 0 needs it to say where it listens
# What a rank with a GPU has work for: its engine's scheduler and sampler, tokenizers, grading, loading and saving.
CPUS_OF_GPU_RANK = 8
# Below Linux's range for outgoing connections (32768 and up), so that no client socket takes the port meanwhile.
PORTS = range(20_000, 32_000)


def place(env: Mapping[str, str], world_size: int) -> Place:
    """Return whether a foreground command should start ranks here ("alone"), through srun ("allocation"), or is a rank
    itself.

    A step of one task is a user's interactive shell (`srun --pty bash`) and counts as alone. Raises UserError where
    a step has another number of tasks than the configuration has ranks.
    """
    if "SLURM_JOB_ID" not in env:
        return "alone"
    if not slurm.in_step(env):
        return "allocation" if shutil.which("srun", path=env.get("PATH")) else "alone"
    num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks == 1:
        return "alone"
    if num_tasks != world_size:
        raise UserError(
            f"this srun step has {num_tasks} tasks, but launch.nodes * launch.tasks_per_node is {world_size}; "
            f"start srun with --ntasks={world_size} or change the config"
        )
    return "rank"


def check_nodes(launch: LaunchConfig, where: Place, env: Mapping[str, str] = os.environ) -> None:
    """Raise UserError where there are fewer nodes than `launch.nodes`."""
    if where == "alone" and launch.nodes != 1:
        raise UserError(
            f"launch.nodes is {launch.nodes}, but this is one machine outside a Slurm allocation; "
            "set launch.nodes=1, or use `tango submit`"
        )
    nodes = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes < launch.nodes:
        raise UserError(
            f"launch.nodes is {launch.nodes}, but job {env.get('SLURM_JOB_ID')} has {nodes}; ask for "
            f"--nodes={launch.nodes}"
        )


def own_ranks(env: Mapping[str, str] = os.environ) -> range:
    """Return the ranks of this task, as a launcher or srun gives them: one, unless `RANKS_OF_TASK` says how many from
    RANK on.

    Raises UserError where neither started this process.
    """
    if "RANK" in env and "MASTER_PORT" in env:
        first = int(env["RANK"])
        return range(first, first + int(env.get(RANKS_OF_TASK, "1")))
    if "SLURM_PROCID" not in env:
        raise UserError("this process is no rank: neither RANK and MASTER_PORT nor SLURM_PROCID is set")
    return range(int(env["SLURM_PROCID"]), int(env["SLURM_PROCID"]) + 1)


def threads_of_rank(launch: LaunchConfig, env: Mapping[str, str] = os.environ) -> int:
    """Return the CPU threads of each rank: `launch.threads_per_rank`, or the machine's share for the device."""
    if launch.threads_per_rank is not None:
        return launch.threads_per_rank
    if launch.device == "cpu":
        return 1
    if "SLURM_CPUS_PER_TASK" in env:
        share = int(env["SLURM_CPUS_PER_TASK"])
    else:
        share = len(os.sched_getaffinity(0)) // launch.tasks_per_node
    return max(min(share, CPUS_OF_GPU_RANK), 1)


def rank_variables(rank: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return RANK and LOCAL_RANK of a rank of this task."""
    return {"RANK": str(rank), "LOCAL_RANK": str(int(env["LOCAL_RANK"]) + rank - int(env["RANK"]))}


def prepare_rank(directory: RunDirectory, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the torchrun-style variables of this task, none where a launcher has set them. Rank 0 publishes where it
    listens.

    Raises UserError where rank 0 has no address for its peers, NodeFailed where it publishes none.
    """
    rank = own_ranks(env)[0]
    if "RANK" in env and "MASTER_PORT" in env:
        return {}
    file = rendezvous_file(directory, env)
    if rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        found = {"address": own_address(env), "port": free_port()}
        write_atomically(file, json.dumps(found))
    else:
        found = json.loads(await_file(file))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_on_node(env)),
        "NODE_RANK": env["SLURM_NODEID"],
        "MASTER_ADDR": str(found["address"]),
        "MASTER_PORT": str(found["port"]),
    }


def rendezvous_file(directory: RunDirectory, env: Mapping[str, str]) -> Path:
    """Return the file in which rank 0 writes its address; every start of every step has another."""
    start = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"
    return directory.control / f"rendezvous-{start}.json"


def await_file(file: Path) -> str:
    """Return the text of a file that rank 0 writes, once the file exists. Raises NodeFailed where it does not come."""
    if poll(file.is_file, RENDEZVOUS_TIMEOUT_SECONDS, every=0.1):
        return file.read_text()
    raise NodeFailed(
        f"rank 0 did not write {file} within {RENDEZVOUS_TIMEOUT_SECONDS:.0f} s. Is the run directory on storage "
        "that every node sees? Did rank 0 start (logs/rank_00000.log)?"
    )


def free_port() -> int:
    """Return a free TCP port of this machine."""
    start = (os.getpid() * 7919 + time.monotonic_ns()) % len(PORTS)
    for offset in range(len(PORTS)):
        port = PORTS[(start + offset) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on {socket.gethostname()}")


def own_address(env: Mapping[str, str]) -> str:
    """Return an address of this node that its peers can reach.

    MASTER_ADDR if the environment has it; else that of the interface that GLOO_SOCKET_IFNAME names (on some clusters
    the node's name stands for a slower network, or one that its peers do not reach); else the node's name where that
    resolves; else Slurm's NodeAddr. Raises UserError where there is none.
    """
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if env.get("GLOO_SOCKET_IFNAME"):
        return interface_address(env["GLOO_SOCKET_IFNAME"].split(",")[0])
    name = env.get("SLURMD_NODENAME", socket.gethostname())
    if resolves(name):
        return name
    address = node_address(name)
    if address is None or not resolves(address):
        raise UserError(
            f"the name of node {name} does not resolve and `scontrol show node {name}` gives no usable NodeAddr; "
            "set MASTER_ADDR to an address of the first node"
        )
    return address


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine. Raises UserError where it has none."""
    get_address = 0x8915  # Linux's SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, get_address, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            raise UserError(
                f"{socket.gethostname()} has no network interface {interface} with an IPv4 address; up there: "
                f"{', '.join(interfaces())}. Correct socket_interface in the profile, or GLOO_SOCKET_IFNAME"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def interfaces() -> list[str]:
    """Return network interfaces that are up, loopback left out."""
    up = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        state = folder / "operstate"
        if folder.name != "lo" and state.exists() and state.read_text().strip() == "up":
            up.append(folder.name)
    return up


def resolves(name: str) -> bool:
    """Return whether `name` is a host name or address that this machine can look up."""
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror:
        return False
    return True


def node_address(name: str) -> str | None:
    """Return Slurm's NodeAddr of a node, None where it has none. Raises NoAnswer after minutes of silence."""
    return slurm.patiently(lambda: slurm.node_address(name), NODE_ADDRESS_SECONDS, every=5.0)


def _tasks_on_node(env: Mapping[str, str]) -> int:
    """Return this node's number of tasks, from a list such as `4(x2),3` over the nodes of the step."""
    counts: list[int] = []
    for item in env["SLURM_STEP_TASKS_PER_NODE"].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        assert match, item
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts[int(env["SLURM_NODEID"])]


def python_path(root: Path) -> str:
    """Return PYTHONPATH for a process that runs the code below `root`; this process's own entries follow.

    An empty entry would be the working directory, whose files `python -P` is to keep out. Raises UserError for a folder
    that PYTHONPATH cannot name: other code would run.
    """
    if os.pathsep in str(root):
        raise UserError(f"{root} holds a colon, at which Python splits PYTHONPATH; give the folder another name")
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
