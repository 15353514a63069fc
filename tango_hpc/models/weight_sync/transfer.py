"""Carries out a plan: packs slices into messages, moves them, unpacks them into the engine.

Two rounds are in flight: while one is being received, the one before it is installed. Each has one buffer, in which
the messages to and from all peers of the round lie one after another. Megatron-core's `resharding` copy services
were looked at: they post every slice of a whole sync as its own message without a bound on memory, and the Gloo one
needs CUDA streams; what remains of them here is their batched isend and irecv.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from tango_hpc.models.layout.trainer_layout import Box, LocalParam
from tango_hpc.models.weight_sync.plan import Pack, RankPlan, Segment, segment_elements

Slices = tuple[slice, ...]
_POLL_SECONDS = 0.0005  # between two looks at what NCCL has in flight


class WeightSyncError(RuntimeError):
    """A sync that could not finish; the engine's weights are undefined and the run must end."""


class Target(Protocol):
    """The engine's weights, into which a transfer installs (`tango_hpc.models.engine.weights.EngineWeights`)."""

    def open(self, module_name: str) -> None: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def close(self, module_name: str) -> None: ...


class Locator:
    """Finds the local slice of a segment."""

    def __init__(self, layout: Mapping[str, LocalParam]) -> None:
        self._pieces: dict[str, list[tuple[Box, str, Box]]] = defaultdict(list)
        for name, param in layout.items():
            for piece in param.pieces:
                self._pieces[piece.tensor].append((piece.box, name, piece.local))

    def find(self, segment: Segment) -> tuple[str, Slices]:
        """Return parameter name and slices of a segment that lies within one piece."""
        tensor, wanted = segment
        for box, name, local in self._pieces[tensor]:
            if all(a <= start and stop <= b for (start, stop), (a, b) in zip(wanted, box, strict=True)):
                return name, tuple(
                    slice(start - a + at, stop - a + at)
                    for (start, stop), (a, _), (at, _) in zip(wanted, box, local, strict=True)
                )
        raise AssertionError(f"{segment} is not held here")


@dataclass(frozen=True)
class _Item:
    """One slice of a message."""

    name: str
    slices: Slices
    shape: tuple[int, ...]
    elements: int
    tensor: str


@dataclass(frozen=True)
class _Message:
    peer: int
    items: list[_Item]

    @property
    def elements(self) -> int:
        return sum(item.elements for item in self.items)

    def describe(self) -> str:
        """Return the first few names of the tensors, in words."""
        names = list(dict.fromkeys(item.tensor for item in self.items))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class _RoundWork:
    sends: list[_Message]
    receives: list[_Message]


class Transfer:
    """One rank's part of a plan, resolved to slices of its parameters; run as often as there are syncs.

    The limit of `group` must be longer than `timeout_seconds`.
    """

    def __init__(
        self,
        plan: RankPlan,
        source: Mapping[str, LocalParam],
        target: Mapping[str, LocalParam],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup,
        timeout_seconds: float,
    ) -> None:
        self.rank, self.dtype, self.device, self.group = plan.rank, dtype, device, group
        self.timeout_seconds = timeout_seconds
        source_locator, target_locator = Locator(source), Locator(target)
        self.rounds = [
            _RoundWork(
                [_message(peer, packs, source_locator) for peer, packs in part.sends.items()],
                [_message(peer, packs, target_locator) for peer, packs in part.receives.items()],
            )
            for part in plan.rounds
        ]
        self.local: dict[str, list[tuple[_Item, _Item]]] = defaultdict(list)
        for segment in plan.local:
            item = _item(segment, target_locator)
            self.local[_module(item.name)].append((_item(segment, source_locator), item))
        self.remote_elements: dict[str, int] = defaultdict(int)
        for part in self.rounds:
            for message in part.receives:
                for item in message.items:
                    self.remote_elements[_module(item.name)] += item.elements
        self.buffer_elements = max(
            (sum(m.elements for m in (*part.sends, *part.receives)) for part in self.rounds), default=0
        )

    @torch.no_grad()
    def run(self, sources: Mapping[str, torch.Tensor], target: Target) -> int:
        """Install all weights; the number of bytes that this rank sent."""
        remaining = dict(self.remote_elements)
        slots = [
            torch.empty(self.buffer_elements, dtype=self.dtype, device=self.device)
            for _ in range(min(2, len(self.rounds)))
        ]
        pending = [self._post(number, slots[number], sources) for number in range(len(slots))]
        for module in [name for name in self.local if not remaining.get(name)]:
            self._open(module, sources, target)
            target.close(module)
        opened: set[str] = set()
        for number in range(len(self.rounds)):
            for message, values in pending[number].arrivals():
                for item in message.items:
                    module = _module(item.name)
                    if module not in opened:
                        opened.add(module)
                        self._open(module, sources, target)
                    part, values = values[: item.elements], values[item.elements :]
                    target.tensor(item.name)[item.slices].copy_(part.view(item.shape))
                    remaining[module] -= item.elements
                    if not remaining[module]:
                        target.close(module)
            pending[number].finish_sends()
            if number + 2 < len(self.rounds):
                pending.append(self._post(number + 2, slots[number % 2], sources))
        assert not any(remaining.values()), "the plan did not fill every module"
        return sum(m.elements for part in self.rounds for m in part.sends) * self.dtype.itemsize

    def _open(self, module: str, sources: Mapping[str, torch.Tensor], target: Target) -> None:
        """Open a module of the engine and copy what this rank has for it."""
        target.open(module)
        for source, item in self.local.get(module, ()):
            target.tensor(item.name)[item.slices].copy_(sources[source.name][source.slices])

    def _post(self, number: int, buffer: torch.Tensor, sources: Mapping[str, torch.Tensor]) -> _Pending:
        """Fill the buffer of a round with what is sent, and start its messages."""
        part, offset, operations = self.rounds[number], 0, []
        for message in part.sends:
            start = offset
            for item in message.items:
                buffer[offset : offset + item.elements].view(item.shape).copy_(sources[item.name][item.slices])
                offset += item.elements
            operations.append((message, "send", buffer[start:offset]))
        for message in part.receives:
            operations.append((message, "receive", buffer[offset : offset + message.elements]))
            offset += message.elements
        return _Pending(self, operations)


class _Pending:
    """The messages of one round in flight."""

    def __init__(self, transfer: Transfer, operations: list[tuple[_Message, str, torch.Tensor]]) -> None:
        self.transfer, self.operations = transfer, operations
        calls = {"send": dist.isend, "receive": dist.irecv}
        self.started = time.monotonic()
        try:
            works = dist.batch_isend_irecv(
                [
                    P2POp(calls[kind], values.view(torch.uint8), message.peer, transfer.group)
                    for message, kind, values in operations
                ]
            )
        except RuntimeError as error:
            message, kind, _ = operations[0]
            raise self._explain(kind, message, error) from error
        # NCCL answers with one handle for the whole batch, Gloo with one for each message.
        self.works = works if len(works) == len(operations) else works * len(operations)

    def arrivals(self) -> Iterator[tuple[_Message, torch.Tensor]]:
        """Yield each message of the round as it is received."""
        for work, (message, kind, values) in zip(self.works, self.operations, strict=True):
            if kind == "receive":
                self._wait(work, kind, message)
                yield message, values

    def finish_sends(self) -> None:
        """Wait until the buffer may be used again."""
        for work, (message, kind, _) in zip(self.works, self.operations, strict=True):
            if kind == "send":
                self._wait(work, kind, message)

    def _wait(self, work: dist.Work, kind: str, message: _Message) -> None:
        limit = self.transfer.timeout_seconds
        try:
            if self.transfer.device.type == "cuda":
                # `wait(timeout)` of NCCL ends the communicator when it gives up; the watchdog finds it so a moment
                # later and ends the process, whether or not our message is out.
                while not work.is_completed():
                    if time.monotonic() - self.started > limit:
                        raise TimeoutError("the peer has not answered")
                    time.sleep(_POLL_SECONDS)
                work.wait()
            else:
                work.wait(timedelta(seconds=limit))
        except (RuntimeError, TimeoutError) as error:
            raise self._explain(kind, message, error) from error

    def _explain(self, kind: str, message: _Message, error: Exception) -> WeightSyncError:
        direction = "to" if kind == "send" else "from"
        return WeightSyncError(
            f"weight sync, rank {self.transfer.rank}, phase {kind}: {message.describe()} {direction} "
            f"rank {message.peer} failed after {time.monotonic() - self.started:.1f} s "
            f"(reshard.timeout_seconds is {self.transfer.timeout_seconds:g}): {str(error).splitlines()[0]}"
        )


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _item(segment: Segment, locator: Locator) -> _Item:
    name, slices = locator.find(segment)
    shape = tuple(stop - start for start, stop in segment[1])
    return _Item(name, slices, shape, segment_elements(segment), segment[0])


def _message(peer: int, packs: list[Pack], locator: Locator) -> _Message:
    return _Message(peer, [_item(segment, locator) for pack in packs for segment in pack])
