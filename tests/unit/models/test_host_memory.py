"""Page-locked memory and what moves into it. CUDA's two calls are recorded instead of made; all else is the
real code.
"""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tango_hpc.models.trainer import pinned_memory as host_memory
from tango_hpc.models.trainer.offload import DeviceMemory

PAGE = mmap.PAGESIZE


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What CUDA would be asked to lock and to unlock; pages are still there when they are unlocked."""
    seen: list[tuple[Any, ...]] = []

    def unlock(address: int) -> None:
        seen.append(("unlock", address, ctypes.string_at(address, 1)))

    monkeypatch.setattr(host_memory, "page_lock", lambda address, size: seen.append(("lock", address, size)))
    monkeypatch.setattr(host_memory, "page_unlock", unlock)
    return seen


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as one of a GPU, whose memory is this machine's."""
    monkeypatch.setattr(host_memory, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_memory_is_locked_once_and_no_larger_than_its_pages(calls: list[tuple[Any, ...]]) -> None:
    sizes = [5 * 2**20 + 1, 0, 3, 700]
    tensors = host_memory.host_memory(sizes)
    assert [tensor.nbytes for tensor in tensors] == sizes
    ((what, address, locked),) = calls
    assert what == "lock" and address % PAGE == 0
    needed = 5 * 2**20 + 256 + 256 + 768  # each begins at a multiple of 256
    assert locked == whole_pages(needed)  # a power of two would be 8 MiB
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [], [2], [3]]


def test_memory_is_unlocked_when_its_last_user_is_gone(calls: list[tuple[Any, ...]]) -> None:
    first, second = host_memory.host_memory([8, 8])
    part = second.view(torch.float32)[1:]
    address = calls[0][1]
    del first, second
    assert len(calls) == 1
    part.fill_(1.0)
    del part
    assert calls[1:] == [("unlock", address, calls[1][2])]


def test_memory_that_cannot_be_locked_serves_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_memory, "page_lock", lambda *_: "CUDA error 2, out of memory")
    monkeypatch.setattr(host_memory, "_warned", [])
    (tensor,), (other,) = host_memory.host_memory([2**20]), host_memory.host_memory([2**20])
    assert tensor.fill_(3).sum() == 3 * 2**20 and other.fill_(4).sum() == 4 * 2**20
    del tensor, other
    assert calls == []  # what was never locked is not unlocked
    (line,) = capsys.readouterr().out.splitlines()
    assert "CUDA error 2, out of memory" in line and "several times as long" in line and "`ulimit -l`" in line


def test_a_failed_lock_is_explained_and_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, launched = [], []

    def register(*arguments: int) -> int:
        asked.append(arguments)
        return 2 if arguments[1] > PAGE else 0

    def launch(*_: Any, **options: Any) -> None:
        launched.append(options)
        raise RuntimeError("CUDA error: out of memory")  # as PyTorch does while CUDA remembers a failure

    cudart = SimpleNamespace(cudaHostRegister=register, cudaGetErrorString=lambda error: f"text of {error}")
    assert host_memory.page_lock(0, PAGE) is None  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", launch)
    assert host_memory.page_lock(PAGE, PAGE) is None and launched == []
    assert host_memory.page_lock(PAGE, 2 * PAGE) == "CUDA error 2, text of 2"
    assert launched == [{"device": "cuda"}]
    assert asked == [(PAGE, PAGE, 1), (PAGE, 2 * PAGE, 1)]


def test_copies_of_a_gpus_tensors_share_one_lock(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7), "c": torch.randn(4, 6).t()}
    plain = host_memory.host_copies(tensors)
    assert calls == []
    monkeypatch.setattr(host_memory, "on_gpu", lambda tensor: True)
    locked = host_memory.host_copies(tensors)
    assert [what for what, *_ in calls] == ["lock"]
    for name, tensor in tensors.items():
        for copies in (plain, locked):
            assert torch.equal(copies[name], tensor) and copies[name].dtype == tensor.dtype
            assert copies[name].data_ptr() != tensor.data_ptr()


class Trained(torch.nn.Module):
    """Two weights in one storage, as Megatron-core keeps them, with gradients, and moments of their own."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(3000.0)
        self.a, self.b = torch.nn.Parameter(whole[:1000]), torch.nn.Parameter(whole[1000:])
        gradients = torch.ones(3000)
        self.a.main_grad, self.b.main_grad = gradients[:1000], gradients[1000:]
        self.state = [torch.arange(1000.0) + 1, torch.arange(2000.0) + 2]

    def tensors(self) -> list[torch.Tensor]:
        return self.state

    def values(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in (self.a, self.b, *self.state)]

    def bytes_there(self) -> tuple[int, int, int]:
        gradients = self.a.main_grad.untyped_storage().nbytes()
        return self.a.untyped_storage().nbytes(), sum(t.untyped_storage().nbytes() for t in self.state), gradients


@pytest.mark.usefixtures("on_a_gpu")
def test_all_that_is_kept_lies_in_one_locked_piece(calls: list[tuple[Any, ...]]) -> None:
    model: Any = Trained()
    memory, before = DeviceMemory(model, model), model.values()
    for _ in range(3):
        memory.offload()
        assert model.bytes_there() == (0, 0, 0)
        assert all(map(torch.equal, map(memory.where_it_is, (model.a, model.b, *model.state)), before))
        memory.onload(weights_only=True)
        assert memory.where_it_is(model.b) is model.b and torch.equal(memory.where_it_is(model.state[1]), before[3])
        assert model.bytes_there() == (12000, 0, 0)
        memory.offload(weights_changed=False)
        memory.onload()
        assert model.bytes_there() == (12000, 12000, 12000)
        assert all(map(torch.equal, model.values(), before))
    ((what, _, locked),) = calls  # taken by the first, used by all
    assert what == "lock" and locked == whole_pages(12032 + 4096 + 8192)


def test_on_a_cpu_only_gradients_leave() -> None:
    model: Any = Trained()
    memory, before = DeviceMemory(model, model), model.values()
    memory.offload()
    memory.offload(weights_changed=False)
    assert model.bytes_there() == (12000, 12000, 0)
    assert memory.where_it_is(model.a) is model.a
    memory.onload(weights_only=True)
    assert model.bytes_there() == (12000, 12000, 0)
    memory.onload()
    model.b.main_grad.fill_(3.0)
    assert model.a.main_grad.shape == (1000,) and torch.equal(model.b.main_grad, torch.full((2000,), 3.0))
    assert all(map(torch.equal, model.values(), before))


@pytest.mark.usefixtures("on_a_gpu")
def test_weights_that_changed_are_copied_and_others_are_not(calls: list[tuple[Any, ...]]) -> None:
    model: Any = Trained()
    memory = DeviceMemory(model, model)
    memory.offload(keep_weights=True)
    assert model.bytes_there() == (12000, 0, 0)
    memory.offload(weights_changed=False)  # never copied so far
    memory.onload()
    before = model.values()
    model.a.data.add_(1)
    memory.offload(weights_changed=False)
    memory.onload()
    assert all(map(torch.equal, model.values(), before))
    model.a.data.add_(1)
    model.state[0].add_(1)
    memory.offload()
    memory.onload()
    assert torch.equal(model.a, before[0] + 1) and torch.equal(model.state[0], before[2] + 1)
    assert [size for _, _, size in calls] == [
        whole_pages(4096 + 8192),
        whole_pages(12032),
    ]  # what follows weights that stayed has its own piece
