"""Host memory that a GPU copies from and to at full speed: page-locked, and as large as what it is for.

PyTorch's own pinned memory rounds every allocation up to a power of two, up to twice of what is needed. Here many
tensors share one piece of memory, which CUDA locks at once.
"""

from __future__ import annotations

import contextlib
import mmap
import resource
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; more than any element needs
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class _Pages(mmap.mmap):
    """Memory of whole pages, page-locked until nothing looks at it any more."""

    locked_at: int | None

    def __new__(cls, num_bytes: int) -> _Pages:
        pages = super().__new__(cls, -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # After a fork the first process to write to a page would get another one, which the GPU does not know.
        pages.madvise(mmap.MADV_DONTFORK)
        pages.locked_at = None
        return pages

    def __del__(self) -> None:
        if self.locked_at is not None:  # before the pages go back to the system
            page_unlock(self.locked_at)


def host_memory(sizes: Sequence[int]) -> list[Tensor]:
    """Return a tensor of bytes for each of `sizes`, contents not set, in one piece of page-locked memory.

    Memory that cannot be locked serves too, slower: the log says so once, and what can be done.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    pages = _Pages(max(-(-end // mmap.PAGESIZE), 1) * mmap.PAGESIZE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` for as long as a view of it lives
    problem = page_lock(whole.data_ptr(), len(pages))
    if problem is None:
        pages.locked_at = whole.data_ptr()
    else:
        _warn_once(problem, len(pages))
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of `tensors` on the host; what comes from a GPU can go back there at full speed."""
    if not any(on_gpu(tensor) for tensor in tensors.values()):
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    places = host_memory([tensor.nbytes for tensor in tensors.values()])
    copies = {}
    for (name, tensor), place in zip(tensors.items(), places, strict=True):
        copies[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return copies


def on_gpu(tensor: Tensor) -> bool:
    """Return whether `tensor` takes memory of a GPU, which it may have to give up."""
    return tensor.is_cuda


def page_lock(address: int, num_bytes: int) -> str | None:
    """Lock pages for CUDA: None, or why it did not work. Without a GPU there is nothing to do."""
    if not torch.cuda.is_available():
        return None
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(address, num_bytes, _PORTABLE)
    if int(error) == 0:
        return None
    with contextlib.suppress(RuntimeError):
        # CUDA remembers its last error, and PyTorch would take it for one of whatever it starts next.
        torch.ones(1, device="cuda")
    return f"CUDA error {int(error)}, {cudart.cudaGetErrorString(error)}"


def page_unlock(address: int) -> None:
    """Undo `page_lock`. Without a GPU there is nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)


_warned: list[str] = []


def _warn_once(problem: str, num_bytes: int) -> None:
    """Print one line in this process's log."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.2f} GiB"
    if not _warned:
        print(
            f"Warning: {num_bytes / 2**30:.2f} GiB of host memory cannot be page-locked ({problem}). The run goes on,"
            " but each move of weights and optimizer between GPU and host takes several times as long. This process"
            f" may lock {allowed} (`ulimit -l`): ask for more, in a shell with `ulimit -l unlimited`, in Slurm jobs"
            " through LimitMEMLOCK=infinity of slurmd with PropagateResourceLimitsExcept=MEMLOCK in slurm.conf.",
            flush=True,
        )
    _warned.append(problem)
