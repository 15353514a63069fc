"""Two ranks with a process for each of two roles: results go from one role to the other, and who waits sleeps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks

ROLES = ("generator", "verifier")
SECONDS = 2.0


def in_roles(folder: Path) -> dict[str, Any]:
    """Of four processes, make two ranks of two roles; what each of them sees."""
    from torch.distributed import FileStore, PrefixStore

    from tango_hpc.models.parallel.exchange import Exchange, PeerFailedError
    from tango_hpc.models.parallel.ranks import init_distributed, shutdown_distributed
    from tango_hpc.stages.sharing import in_shares

    number = int(os.environ["RANK"])
    rank, role = divmod(number, 2)[0], ROLES[number % 2]
    shutdown_distributed()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    store = FileStore(str(folder / "store"), -1)
    init_distributed(60, PrefixStore(role, store))
    exchange = Exchange.join(store, ROLES, role, 60)
    seen: dict[str, Any] = {"who": (role, rank), "number": exchange.number, "first": exchange.is_first}
    called: list[str] = []

    def work() -> dict[str, Any]:
        called.append(role)
        time.sleep(SECONDS)
        return {"tokens": [[1, 2], []], "by": role}

    before = time.process_time()
    seen["result"] = exchange.run("verifier", work)
    seen["cpu"] = time.process_time() - before
    seen["called"] = called

    def fail() -> None:
        raise OSError(28, "No space left on device")

    try:
        exchange.run("generator", fail)
    except (OSError, PeerFailedError) as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["gathered"] = exchange.all_gather((role, rank))
    seen["any"] = [exchange.any(False), exchange.any((role, rank) == ("verifier", 1))]
    graded: list[int] = []

    def grade(items: Any) -> list[int]:
        graded.extend(items)
        return [item * item for item in items]

    seen["shared"], seen["graded"] = in_shares(exchange, grade, range(7)), graded
    exchange.barrier()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    found = run_ranks(in_roles, 4, tmp_path_factory.mktemp("exchange"))
    return {process["who"]: process for process in found}


EVERYBODY = [("generator", 0), ("generator", 1), ("verifier", 0), ("verifier", 1)]


def test_the_work_of_a_role_is_done_there_and_known_everywhere(seen: Any) -> None:
    assert sorted(seen) == EVERYBODY
    for (role, _), process in seen.items():
        assert process["result"] == {"tokens": [[1, 2], []], "by": "verifier"}
        assert process["called"] == (["verifier"] if role == "verifier" else [])


def test_who_waits_sleeps(seen: Any) -> None:
    assert max(process["cpu"] for process in seen.values()) < SECONDS / 20


def test_a_failure_is_told_to_those_who_wait(seen: Any) -> None:
    assert {seen["generator", rank]["error"] for rank in (0, 1)} == {"OSError: [Errno 28] No space left on device"}
    told = "PeerFailedError: the generator failed: OSError: [Errno 28] No space left on device"
    assert {seen["verifier", rank]["error"] for rank in (0, 1)} == {told}


def test_all_see_all_in_one_order(seen: Any) -> None:
    for who, process in seen.items():
        assert process["gathered"] == EVERYBODY and process["gathered"][process["number"]] == who
        assert process["any"] == [False, True]
    assert [who for who, process in seen.items() if process["first"]] == [("generator", 0)]


def test_shared_work_is_done_once(seen: Any) -> None:
    assert all(process["shared"] == [item * item for item in range(7)] for process in seen.values())
    assert sorted(item for process in seen.values() for item in process["graded"]) == list(range(7))
