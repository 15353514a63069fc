"""A policy's whole state in Megatron-core's distributed checkpoint format: readable in any other layout.

Every rank describes its tensors where they lie, weights and its own share of the optimizer alike, as boxes of at most
PIECE elements with their places in the whole. Writing copies one box at a time and reading fills the tensors in place,
so either takes little memory and no exchange between ranks, where Megatron-core's layout-independent format makes
about three copies of the optimizer first. A save in the background copies what this rank writes into host memory, and
a thread writes it while training goes on. What waits on the host while a GPU is another's is written from there.

A rank writes weights into one file and the rest (optimizer, reference) into another, so that weights alone can stay
(base/run/weights_alone.py). Weights and reference, which all data-parallel ranks hold, are written by all of them in
equal parts.

Two more departures from Megatron-core's way of writing. Each rank writes its file itself instead of starting helper
processes next to vLLM's threads. And a rank that cannot write (a full disk) goes on to the end of the save with its
peers, where all learn of it, instead of leaving them in a collective.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import common as common_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.manifest import FileSum, SummedFile, summed_file
from tango_hpc.base.run.weights_alone import TRAINING, WEIGHTS
from tango_hpc.models.layout.trainer_layout import Piece
from tango_hpc.models.parallel.collectives import all_gather_objects
from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.megatron_cpu import megatron_on_cpu
from tango_hpc.models.trainer.adapters import Adapters
from tango_hpc.models.trainer.limits import PIECE
from tango_hpc.models.trainer.model import PolicyModel
from tango_hpc.models.trainer.optimizer import PolicyOptimizer

# Names of tensors that only training needs begin with these.
REFERENCE, OPTIMIZER = "reference.", "optimizer.state."


@dataclass(frozen=True)
class PolicyState:
    """The state of a policy on this rank that is saved: parameters and reference by name, and the optimizer if any.

    With `adapters` the parameters are theirs: the weights can be made from them and from the model's files.
    `where_it_is` gives the values of a parameter or of optimizer state, which may be away from the GPU.
    """

    model: PolicyModel
    groups: PolicyGroups
    shards: Mapping[str, Tensor]
    reference: Mapping[str, Tensor] | None
    optimizer: PolicyOptimizer | None
    adapters: Adapters | None
    where_it_is: Callable[[Tensor], Tensor]


@dataclass
class _Written:
    """The record of this rank's writing: sums by the name of the file; bytes that it meant to write; what went wrong.

    `copies`: its tensors are copied before any is written.
    """

    copies: bool
    sums: dict[str, FileSum] = field(default_factory=dict)
    planned_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Save:
    """Weights, optimizer, step and reference on their way into `folder`. Making and finishing it are collective.

    In the background a thread of this process writes its file from a copy, and the state may change at once; otherwise
    the file is written when this object is made.
    """

    def __init__(self, state: PolicyState, folder: Path, *, background: bool) -> None:
        self._folder, self._written = folder, _Written(copies=background)
        with _remembering(self._written.problems, folder):
            folder.mkdir(parents=True, exist_ok=True)
        with megatron_on_cpu(), _writing_here(self._written, folder):
            self._request = dist_checkpointing.save(_described(state), str(folder), async_sharded_save=True)
        self._thread = threading.Thread(target=self._write, name="saving", daemon=True)
        self._error: BaseException | None = None
        if background:
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            self._request.async_fn(*self._request.async_fn_args)
        except BaseException as error:  # told by `finish`
            self._error = error

    def is_written(self) -> bool:
        """Return whether this rank's file is written, or could not be: `finish` need not wait for this process."""
        return not self._thread.is_alive()

    def finish(self) -> dict[str, FileSum]:
        """Wait for all ranks and complete the folder; the sums of the large files that this rank wrote.

        OSError, on all ranks, names what failed and how much room was needed.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        written = self._written
        with megatron_on_cpu(), _writing_here(written, self._folder):
            try:
                for complete in self._request.finalize_fns:
                    complete()
            except CheckpointException as error:
                written.problems += [f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
        everyone = all_gather_objects((written.problems, written.planned_bytes))
        problems = list(dict.fromkeys(problem for found, _ in everyone for problem in found))
        if problems:
            needed = sum(planned for _, planned in everyone) / 2**30
            raise OSError(f"{'; '.join(problems)} (the files of the {self._folder.name} need {needed:.3g} GB)")
        return written.sums


def load(state: PolicyState, folder: Path) -> None:
    """Bring the policy to the state in `folder`, which any layout may have written. Raises `CheckFailed` where one of
    them has adapters that the other does not have.
    """
    with megatron_on_cpu():
        _check_adapters(state.adapters, dist_checkpointing.load_common_state_dict(str(folder)).get("adapter"), folder)
        loaded = dist_checkpointing.load(_described(state), str(folder))  # fills the tensors themselves
        if state.optimizer is not None:
            state.optimizer.load(loaded["optimizer"], loaded["step_count"])


def _check_adapters(adapters: Adapters | None, saved: Mapping[str, Any] | None, folder: Path) -> None:
    """Raise `CheckFailed` where a checkpoint's adapters are others than these."""
    asked = None if adapters is None else adapters.facts()
    if asked is None or saved is None:
        if asked != saved:
            has, wants = ("no adapter", "one") if saved is None else ("an adapter", "none")
            raise CheckFailed(f"the checkpoint {folder} has {has}, and the configuration asks for {wants}")
        return
    differing = [f"{key} was {saved.get(key)}, is {value}" for key, value in asked.items() if saved.get(key) != value]
    if differing:
        raise CheckFailed(f"the adapter in the checkpoint {folder} is another one: {'; '.join(differing)}")


def _described(state: PolicyState) -> dict[str, Any]:
    """Return all that a checkpoint holds; tensors as pieces that are views of this rank's own."""
    turns = _Turns(state.groups.data)
    pieces: dict[str, list[ShardedTensor]] = {}
    for name, parts in _placed(state).items():
        parameter = state.shards[name]
        pieces[name] = _pieces(parts, "", state.where_it_is(parameter), turns.replica)
        if state.reference is not None:
            pieces[f"{REFERENCE}{name}"] = _pieces(parts, REFERENCE, state.reference[name], turns.replica)
        if state.optimizer is not None:
            start, tensors = state.optimizer.share_of(parameter)
            for key, tensor in tensors.items():
                # No other data-parallel rank has this share, so it counts as the main copy on whatever rank it lies.
                prefix, share = f"{OPTIMIZER}{key}.", state.where_it_is(tensor)
                pieces[f"{prefix}{name}"] = _pieces(parts, prefix, share, lambda *_: 0, start)
    assert state.shards.keys() <= pieces.keys(), "a parameter is not in the checkpoint"
    described: dict[str, Any] = {"pieces": pieces}
    if state.adapters is not None:
        described["adapter"] = state.adapters.facts()
    if state.optimizer is not None:
        described |= {"optimizer": state.optimizer.common_state(), "step_count": state.optimizer.step_count}
    return described


def _placed(state: PolicyState) -> dict[str, list[ShardedTensor]]:
    """Return the places of each parameter's rows in the whole, in the order in which they lie in the parameter.

    Megatron-core places the two halves of a feed-forward weight, one after the other in the shard, apart in the whole.
    """
    if state.adapters is not None:
        return {
            name: [_place(state, name, piece) for piece in local.pieces]
            for name, local in state.adapters.layout.items()
        }
    names = {id(parameter): name for name, parameter in state.shards.items()}
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": state.groups.data}
    found = {}
    for entry in state.model.sharded_state_dict(metadata=metadata).values():
        if id(entry.data) in names:  # others are empty places for Transformer Engine's own state
            name, entry = names[id(entry.data)], replace(entry, data=state.where_it_is(entry.data))
            found[name] = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    return found


def _place(state: PolicyState, name: str, piece: Piece) -> ShardedTensor:
    """Return the place of rows of an A or B in the tensor that PEFT has of it."""
    assert state.adapters is not None
    values = state.where_it_is(state.shards[name].detach())[slice(*piece.local[0])]
    copy = state.groups.tensor_rank if state.adapters.is_whole(name) else 0
    return ShardedTensor(
        key=piece.tensor,
        data=values,
        dtype=values.dtype,
        local_shape=tuple(values.shape),
        global_shape=state.adapters.tensors[piece.tensor],
        global_offset=tuple(start for start, _ in piece.box),
        axis_fragmentations=None,
        replica_id=(copy, state.groups.data_rank),
    )


class _Turns:
    """Share out among data-parallel ranks what all of them hold, a piece at a time.

    All ranks count the same pieces in the same order, so they agree without a word.
    """

    def __init__(self, data_group: ProcessGroup) -> None:
        self._rank, self._bytes = data_group.rank(), [0] * data_group.size()

    def replica(self, copies: tuple[int, ...], num_bytes: int) -> int:
        """Return this rank's number among the copies of a piece; number 0 writes. The rank with least so far gets it.

        `copies` are the piece's numbers among tensor and pipeline ranks. Where one is not 0, none of these ranks
        writes.
        """
        writer = self._bytes.index(min(self._bytes))
        if not any(copies):
            self._bytes[writer] += num_bytes
        return (self._rank - writer) % len(self._bytes)


def _pieces(
    parts: Sequence[ShardedTensor],
    prefix: str,
    tensor: Tensor,
    replica: Callable[[tuple[int, ...], int], int],
    start: int = 0,
) -> list[ShardedTensor]:
    """Return boxes of `tensor`, which holds the elements from `start` on of the flattened shard that `parts` place.

    `replica` numbers a box among data-parallel ranks, as in `_Turns`.
    """
    flat_N = tensor.detach().view(-1)
    pieces, first = [], 0
    for part in parts:
        assert part.prepend_axis_num == 0, part
        last, copies = first + part.data.numel(), part.replica_id[:-1]
        for low, offset, shape in _boxes(
            part.local_shape, max(start, first) - first, min(start + len(flat_N), last) - first
        ):
            begin = first + low - start
            box = flat_N[begin : begin + math.prod(shape)].view(shape)
            place = tuple(map(sum, zip(part.global_offset, offset, strict=True)))
            pieces.append(
                replace(
                    part,
                    key=f"{prefix}{part.key}",
                    data=box,
                    dtype=box.dtype,
                    local_shape=shape,
                    global_offset=place,
                    axis_fragmentations=None,  # boxes of any size
                    replica_id=(*copies, replica(copies, box.nbytes)),
                )
            )
        first = last
    return pieces


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements [start, stop) of a row-major vector or matrix into boxes: (first element, offset, shape)."""
    width = math.prod(shape[1:])
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            rows, length = 1, min(width - column, stop - start)
        else:
            rows, length = min((stop - start) // width, max(PIECE // width, 1)), width
        yield start, (row, column)[: len(shape)], (rows, length)[: len(shape)]
        start += rows * length


class _Writer(filesystem_async.FileSystemWriterAsync):
    """Writes its files in this process, a tensor at a time."""

    written: _Written

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self._plan, self._planner = plan, planner
        self._copies = [self._resolve(item) for item in plan.items] if self.written.copies else None

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[..., Any] | None, list[Any]]:
        return self._write, None, []

    def _write(self) -> None:
        self._results: Any = []
        self.written.planned_bytes = sum(map(_num_bytes, self._plan.items))
        files: dict[str, list[int]] = {}
        for number, item in enumerate(self._plan.items):
            end = TRAINING if item.index.fqn.startswith((OPTIMIZER, REFERENCE)) else WEIGHTS
            files.setdefault(f"{self._plan.storage_data.prefix}{end}", []).append(number)
        stream: SummedFile | None = None
        try:
            for name, numbers in files.items():
                with _without_zip_checksums(), summed_file(Path(self.checkpoint_dir, name)) as stream:
                    self._write_file(name, stream, numbers)
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            known = stream.error if stream is not None else None
            self._results = filesystem_async._wrap_exception(known or error)

    def _write_file(self, name: str, stream: SummedFile, numbers: Sequence[int]) -> None:
        """Write the items of these numbers."""
        for number in numbers:
            item = self._plan.items[number]
            data = self._resolve(item) if self._copies is None else self._copies[number]
            if self._copies is not None:
                self._copies[number] = None
            self._results.append(
                _write_item(self.transforms, cast(Any, stream), data, item, name, SerializationFormat.TORCH_SAVE)
            )
        self.written.sums[name] = stream.close()

    def _resolve(self, item: Any) -> Any:
        """Return the data of an item to write: bytes, or a tensor in host memory."""
        data = self._planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            return data
        there = data.detach().cpu()
        shares = there.data_ptr() == data.data_ptr() and self.written.copies
        if shares or there.untyped_storage().nbytes() != there.nbytes:
            there = there.clone()  # a view would be written with all that it looks at
        return there

    def retrieve_write_results(self) -> Any:
        return self._results

    def finish(self, metadata: Any, results: Any) -> None:
        with _remembering(self.written.problems, self.checkpoint_dir):
            super().finish(metadata, results)


@contextlib.contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Have torch.save leave out its own CRC-32 of every tensor, which torch.load does not look at: the time for
    ours.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _num_bytes(item: Any) -> int:
    """Return the bytes of a tensor of the plan, 0 for other items."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@contextlib.contextmanager
def _remembering(problems: list[str], folder: Path) -> Iterator[None]:
    """Note a failure to write into `folder` and go on."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        where = f": '{folder}'" if isinstance(error, OSError) and error.filename is None else ""
        problems.append(f"rank {dist.get_rank()}: {error}{where}")


@contextlib.contextmanager
def _writing_here(written: _Written, folder: Path) -> Iterator[None]:
    """Put our writer, and our handling of failures, in the place of Megatron-core's."""

    def tolerant(write: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            with _remembering(written.problems, folder):
                write(*args, **kwargs)

        return run

    replacements = [
        (torch_strategy, "FileSystemWriterAsync", type("_Writer", (_Writer,), {"written": written})),
        (serialization, "save_config", tolerant(serialization.save_config)),
        (
            common_strategy.TorchCommonSaveStrategy,
            "save_common",
            tolerant(common_strategy.TorchCommonSaveStrategy.save_common),
        ),
    ]
    originals = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(replacements, originals, strict=True):
            setattr(owner, name, value)
