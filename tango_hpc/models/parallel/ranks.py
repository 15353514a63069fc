"""This process's place among the ranks, from the environment that the launcher sets."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch import Tensor

from tango_hpc.base.errors import NodeFailed, UserError
from tango_hpc.base.run.worker import RANKS_OF_TASK
from tango_hpc.models.parallel import groups
from tango_hpc.models.parallel.collectives import all_gather_objects

BACKLOG = 2048  # processes that may call at once when a large job starts


@dataclass(frozen=True)
class RankInfo:
    """This process among all: `local_rank` counts within a node, `device` is where tensors live."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int
    device: torch.device


def open_store(timeout_seconds: float, *, hosts: bool) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, in which processes find each other; one of them `hosts` it.

    It knows no passwords: where it can, it listens at that one address, and not on every network that the machine has.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    world_size = os.environ["WORLD_SIZE"]
    spans_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < int(world_size)
    listener = listen_at(address, port, spans_nodes=spans_nodes) if hosts else None
    return dist.TCPStore(
        address,
        port,
        is_master=hosts,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def listen_at(address: str, port: int, *, spans_nodes: bool) -> socket.socket | None:
    """Return a socket that listens at `address` alone; None where others may not reach it there.

    So it is behind an address translation. And a name may stand for one address here and for another on the other nodes
    (/etc/hosts, several networks, IPv6 beside IPv4), each of which looks it up itself.
    """
    if spans_nodes and not _is_number(address):
        print(f"{address} is looked up by each node: the store listens on all interfaces", flush=True)
        return None
    for family, kind, protocol, _, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    print(
        f"MASTER_ADDR {address} is no address of this node's interfaces: the store listens on all of them", flush=True
    )
    return None


def _is_number(address: str) -> bool:
    try:
        ip_address(address)
    except ValueError:
        return False
    return True


def init_distributed(timeout_seconds: float = 1800, store: dist.Store | None = None) -> RankInfo:
    """Join the process group that RANK, WORLD_SIZE and LOCAL_RANK describe.

    Its processes meet in `store`, or at MASTER_ADDR and MASTER_PORT. On a GPU, tensors travel over NCCL and objects
    over Gloo; on a CPU, all over Gloo. A collective that a peer does not join within `timeout_seconds` ends the
    process.
    """
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise UserError(f"not started by a launcher: {', '.join(missing)} not set in the environment")
    rank, world_size, local_rank = (int(os.environ[name]) for name in needed[:3])
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if sees_one_gpu(num_gpus):
            os.environ["LOCAL_RANK"] = "0"  # vLLM counts GPUs by it
        elif local_rank >= num_gpus:
            raise NodeFailed(
                f"rank {rank} is the {local_rank + 1}th on its node, which shows {num_gpus} GPUs; start one task"
                " per GPU"
            )
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        # A model that is sure of itself has probabilities and gradients so small that a CPU takes many times as long.
        torch.set_flush_denormal(True)
    timeout = timedelta(seconds=timeout_seconds)
    store = store or open_store(timeout_seconds, hosts=rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    groups.limit_collectives(timeout)
    if device.type == "cuda":
        _check_own_gpus(device)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return RankInfo(rank, world_size, local_rank, -(-world_size // ranks_per_node), device)


def _check_own_gpus(device: torch.device) -> None:
    """Raise `UserError` where two ranks have one GPU, or GPUs of different kinds. Collective."""
    properties = torch.cuda.get_device_properties(device)
    check_cards(all_gather_objects((str(properties.uuid), properties.name)))


def check_cards(cards: Sequence[tuple[str, str]]) -> None:
    """Raise `UserError` where ranks share a GPU, or one has another kind; `cards` are (uuid, name) by rank.

    All ranks are given the same share of the work and of the memory that the plan was made for.
    """
    owners: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for rank, (card, kind) in enumerate(cards):
        if card in owners:
            raise UserError(f"ranks {owners[card]} and {rank} were given the same GPU ({card}); start one task per GPU")
        owners[card] = rank
        kinds.setdefault(kind, rank)
    if len(kinds) > 1:
        found = ", ".join(f"{kind} (rank {rank})" for kind, rank in kinds.items())
        raise UserError(
            f"the ranks were given different kinds of GPU: {found}; ask for one of them, by gpu_type or constraint in"
            " the profile, or sbatch's --gpus-per-node=KIND:COUNT or --constraint"
        )


def sees_one_gpu(num_gpus: int) -> bool:
    """Return whether Slurm shows this rank its own GPU alone, as it does with `--gpus-per-task=1`."""
    return num_gpus == 1 and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and RANKS_OF_TASK not in os.environ


def this_device() -> torch.device:
    """Return where this process keeps its tensors: its GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device; to a GPU through pinned memory, as from other memory a copy waits for all
    before it.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def is_busy(stream: torch.cuda.Stream) -> bool:
    """Return whether work of a GPU's stream has not ended. Never waits; any thread may ask."""
    try:
        return not stream.query()
    except RuntimeError:  # of work that failed, which the thread that waits for it will tell
        return False


def shutdown_distributed() -> None:
    """Leave the process group, if joined."""
    groups.forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
