"""Process groups: every rank makes as many as every other, and how long their operations may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tango_hpc.models.parallel.groups import PolicyGroups
from tango_hpc.models.parallel.ranks import init_distributed, is_busy, shutdown_distributed
from tango_hpc.models.weight_sync import transfer

Cut = tuple[int, int]  # tensor, pipeline

# World size, and the cuts of the roles that a process trains one after the other.
WORLDS: list[tuple[int, list[Cut]]] = [
    *((size, [(tensor, size // tensor // data)]) for size, tensor, data in (
        (1, 1, 1), (2, 2, 1), (2, 1, 1), (3, 1, 1), (4, 2, 2), (4, 1, 1), (6, 2, 1), (6, 1, 2), (8, 2, 1), (8, 1, 2),
        (8, 1, 1), (12, 2, 2), (16, 4, 1), (16, 2, 2), (24, 2, 4),
    )),
    (3, [(1, 3), (1, 1)]),
    (8, [(1, 4), (2, 2)]),
    (8, [(2, 4), (1, 8)]),
    (12, [(2, 3), (2, 3), (1, 6)]),
]  # fmt: skip


@pytest.fixture
def nobody() -> Iterator[None]:
    """No process group before and after."""
    assert not dist.is_initialized()
    yield
    shutdown_distributed()


def names_of(rank: int, world_size: int, cuts: list[Cut]) -> dict[str, tuple[int, ...]]:
    """What PyTorch calls the groups that `rank` makes, by the real functions on a backend without messages."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        for cut in cuts:
            PolicyGroups.create(*cut)
        for first in range(0, world_size, 2):  # as vLLM does
            dist.new_group(list(range(first, min(first + 2, world_size))))
        dist.new_group(list(range(world_size)), use_local_synchronization=True)
        world = dist.distributed_c10d._world
        return {group.group_name: tuple(world.pg_group_ranks[group]) for group in world.pg_names}
    finally:
        shutdown_distributed()


@pytest.mark.parametrize(("world_size", "cuts"), WORLDS)
def test_members_of_a_group_know_it_by_one_name(nobody: None, world_size: int, cuts: list[Cut]) -> None:
    known = [names_of(rank, world_size, cuts) for rank in range(world_size)]
    for rank, names in enumerate(known):
        for name, members in names.items():
            assert rank in members
            assert [known[member].get(name) for member in members] == [members] * len(members)
    assert len({len(names) for names in known}) == 1, "a later group's name counts the ones before it"


def test_the_stages_between_the_ends_have_no_embedding_group(nobody: None) -> None:
    embeddings = []
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        group = PolicyGroups.create(2, 4).embedding
        embeddings.append(group and dist.get_process_group_ranks(group))
        shutdown_distributed()
    assert embeddings == [[0, 6], [1, 7], None, None, None, None, [0, 6], [1, 7]]


def limit_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_groups_of_a_role_have_the_limit_of_the_world(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    init_distributed(7, dist.HashStore())
    groups = PolicyGroups.create(1, 1)
    assert groups.embedding is not None
    made = (groups.tensor, groups.data, groups.pipeline, groups.model, groups.embedding, groups.world)
    assert {limit_of(group) for group in made} == {timedelta(seconds=7)}


def test_a_stream_is_busy_until_its_work_has_ended_or_failed() -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert is_busy(SimpleNamespace(query=lambda: False)) and not is_busy(SimpleNamespace(query=lambda: True))
    assert not is_busy(SimpleNamespace(query=fails))


class NcclWork:
    """A message as NCCL has it. Given a limit, its `wait` would end the communicator, and so the process."""

    def __init__(self, done_after: float) -> None:
        self.done_at, self.waited = time.monotonic() + done_after, False

    def is_completed(self) -> bool:
        return time.monotonic() >= self.done_at

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is None and self.is_completed()
        self.waited = True


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A message to rank 1 under way on a GPU, with a limit of half a second."""

    def post(done_after: float) -> tuple[Any, NcclWork, Any]:
        work = NcclWork(done_after)
        monkeypatch.setattr(transfer, "P2POp", lambda *_: None)
        monkeypatch.setattr(transfer.dist, "batch_isend_irecv", lambda _: [work])
        owner = SimpleNamespace(rank=0, group=None, device=torch.device("cuda"), timeout_seconds=0.5)
        message = SimpleNamespace(peer=1, describe=lambda: "lm_head.weight")
        return transfer._Pending(owner, [(message, "receive", torch.zeros(1))]), work, message

    return post


def test_a_silent_peer_on_a_gpu_is_told_of_while_the_group_lives(posted: Any) -> None:
    pending, work, _ = posted(done_after=60)
    start = time.monotonic()
    with pytest.raises(
        transfer.WeightSyncError,
        match=r"lm_head.weight from rank 1 failed after \d+\.\d s \(reshard.timeout_seconds is 0.5\)",
    ):
        list(pending.arrivals())
    assert 0.4 < time.monotonic() - start < 30 and not work.waited


def test_what_arrives_in_time_on_a_gpu_is_waited_for_by_its_stream(posted: Any) -> None:
    pending, work, message = posted(done_after=0.05)
    assert [arrived for arrived, _ in pending.arrivals()] == [message]
    assert work.waited
