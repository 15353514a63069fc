"""Exchange between the processes of a rank, one for each role: one process computes, and all get the result.

All processes run the same loop. What a role does happens in its own processes, which form a world of their own (the
default process group, with the groups of Megatron-core and vLLM in it); meanwhile the others wait here, asleep. All
processes of a role have the same result, so that it needs to go from one process of a rank to the other ones of that
rank only, over Gloo.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, Store

from tango_hpc.models.parallel.collectives import all_gather_objects, any_rank

Result = TypeVar("Result")


class PeerFailedError(RuntimeError):
    """The role that was at work has failed; its own processes say why."""


class Exchange:
    """This process's place among the roles. Every method is a collective over all processes of the run."""

    def __init__(self, roles: Sequence[str], role: str, group: ProcessGroupGloo | None = None) -> None:
        """`group` joins the processes of this rank in the order of `roles`; a single role needs none."""
        self.roles, self.role = tuple(roles), role
        self._group = group
        assert (group is None) == (len(self.roles) == 1), "one process for each role of a rank"

    @classmethod
    def join(cls, store: Store, roles: Sequence[str], role: str, timeout_seconds: float) -> Exchange:
        """Meet the other processes of this rank in `store`, within the role's own world.

        `timeout_seconds` bounds the wait for another role, so it must be longer than that role's longest phase.
        """
        if len(roles) == 1:
            return cls(roles, role)
        place = PrefixStore(f"exchange/{dist.get_rank()}", store)
        timeout = timedelta(seconds=timeout_seconds)
        return cls(roles, role, ProcessGroupGloo(place, list(roles).index(role), len(roles), timeout))

    @property
    def size(self) -> int:
        """Processes of the run."""
        return len(self.roles) * dist.get_world_size()

    @property
    def number(self) -> int:
        """Return which of them this is: role after role, in the order of ranks."""
        return self.roles.index(self.role) * dist.get_world_size() + dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Return whether this is the one process that writes what a run writes once."""
        return self.number == 0

    def run(self, role: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work` in the processes of `role`, which alone call it; the result must be picklable.

        Where it raises there, it raises `PeerFailedError` in the others.
        """
        if len(self.roles) == 1:
            return work()
        if role != self.role:
            failure, result = self._receive(role)
            if failure is not None:
                raise PeerFailedError(f"the {role} failed: {failure}")
            return result
        try:
            result = work()
        except Exception as error:
            with suppress(RuntimeError):  # the others may have gone; the error is what counts
                self._send((f"{type(error).__name__}: {error}", None))
            raise
        self._send((None, result))
        return result

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every process, by its number."""
        return [value for of_role in self._swap(all_gather_objects(value)) for value in of_role]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process, so that all take the same branch."""
        found = torch.tensor([any_rank(flag)])
        if self._group is not None:
            await_work(self._group.allreduce([found], ReduceOp.MAX))
        return bool(found)

    def barrier(self) -> None:
        """Wait until every process is here."""
        dist.barrier()
        self._swap(None)

    def _swap(self, value: Any) -> list[Any]:
        """Return the value of each process of this rank, by role."""
        if self._group is None:
            return [value]
        mine = _pickled(value)
        sizes = [int(size) for size in self._gather(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = zip(self.roles, self._gather(padded), sizes, strict=True)
        return [value if role == self.role else pickle.loads(data.numpy()[:size]) for role, data, size in parts]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
        found = [torch.empty_like(tensor) for _ in self.roles]
        await_work(self._group.allgather([found], [tensor]))
        return found

    def _send(self, value: Any) -> None:
        if self._group is None:
            return
        data = _pickled(value)
        self._broadcast(torch.tensor([len(data)]), self.role)
        self._broadcast(data, self.role)

    def _receive(self, role: str) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size, role)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data, role)
        return pickle.loads(data.numpy())

    def _broadcast(self, tensor: torch.Tensor, role: str) -> None:
        assert self._group is not None
        await_work(self._group.broadcast(tensor, self.roles.index(role)))


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)


def await_work(work: dist.Work) -> None:
    """Wait for the other processes of this rank; the heartbeat knows this function by its name."""
    work.wait()
