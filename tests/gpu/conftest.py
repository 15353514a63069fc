"""Checks that only a GPU can answer, each with its figures on one page (`bash tools/gpu_check.sh`).

Without a GPU every test is skipped, with the reason. In a rehearsal (PYTEST_GPU_REHEARSAL) the CPU stands in for the
GPU where a check makes sense on it, and the page marks what was measured that way. Whatever touches the GPU runs in a
process of its own, so that an error of CUDA ends one check only. A file's SECONDS is what one of its checks takes on
an H100, roughly: a check starts only where the call has that much time left.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.page import describe_machine
from tests.gpu.state import CUT, add_record, is_settled, read_state, results

REHEARSAL = "PYTEST_GPU_REHEARSAL"
# Set by tests/gpu/__main__.py: the file of the results, the log, the number of the call, its end and what to repeat.
STATE, LOG, CALL, DEADLINE, AGAIN = (f"PYTEST_GPU_{name}" for name in ("STATE", "LOG", "CALL", "DEADLINE", "AGAIN"))
# The order of value; the numbers of the files are those of the page.
PARTS = (1, 2, 3, 4, 6, 5, 7)
_figures: dict[str, list[tuple[str, float, str, str]]] = {}
_started: dict[str, tuple[float, int]] = {}

Note = Callable[..., None]


@pytest.fixture
def device() -> torch.device:
    """The GPU; in a rehearsal the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if REHEARSAL not in os.environ:
        pytest.skip("there is no GPU here (bash tools/gpu_check.sh rehearses on the CPU)")
    return torch.device("cpu")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The GPU, for what says nothing on a CPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU; a CPU says nothing here")
    return device


@pytest.fixture
def vllm() -> None:
    """Skip the check where vLLM is missing, without importing what would take memory of the GPU."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not here (bash tools/gpu_check.sh --wheels FOLDER brings it)")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Puts a figure on the page: what, value, unit, and what it should be."""

    def add(what: str, value: float, unit: str = "", goal: str = "") -> None:
        _figures.setdefault(request.node.nodeid, []).append((what, float(value), unit, goal))

    return add


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what this call has to run: first what an earlier call cut off, which needs the most time, then by value."""
    if STATE not in os.environ:
        return
    state, call, again = Path(os.environ[STATE]), int(os.environ[CALL]), os.environ[AGAIN].split()
    machine = describe_machine()
    add_record(state, call=call, machine=machine, checks={item.nodeid: _title(item) for item in items})
    ends = results(read_state(state), machine["card"])
    left = [item for item in items if not is_settled(ends.get(item.nodeid, []), call, again)]
    left.sort(key=lambda item: (_last_outcome(ends, item) != CUT, PARTS.index(_part(item))))
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


def _last_outcome(ends: dict[str, list[dict[str, Any]]], item: pytest.Item) -> str:
    return ends[item.nodeid][-1]["outcome"] if item.nodeid in ends else ""


def _part(item: pytest.Item) -> int:
    return int(item.path.name.split("_")[1])


def _title(item: pytest.Item) -> str:
    title = (item.function.__doc__ or item.name).strip().splitlines()[0].rstrip(".")  # type: ignore[attr-defined]
    kind = item.nodeid.partition("[")[2].rstrip("]")
    return f"{title} [{kind}]" if kind else title


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a check for the next call where the time of this one is short."""
    if STATE not in os.environ:
        return
    if float(os.environ[DEADLINE]) - time.time() < item.module.SECONDS:  # type: ignore[attr-defined]
        pytest.skip("left for a next call")
    began, size = time.time(), Path(os.environ[LOG]).stat().st_size
    _started[item.nodeid] = (began, size)
    add_record(Path(os.environ[STATE]), call=int(os.environ[CALL]), start=item.nodeid, time=began, log=size)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if item.nodeid not in _started or (report.when != "call" and report.outcome == "passed"):
        return
    began, offset = _started[item.nodeid]
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    if report.outcome == "failed":
        log = Path(os.environ[LOG]).read_bytes()[offset:].decode(errors="replace").strip()
        reason = f"{log[-3000:]}\n{reason[-3000:]}".strip()
    add_record(
        Path(os.environ[STATE]), call=int(os.environ[CALL]), end=item.nodeid, outcome=report.outcome, reason=reason,
        figures=_figures.get(item.nodeid, []), seconds=time.time() - began,
    )  # fmt: skip
