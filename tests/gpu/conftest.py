"""Checks that only a GPU can answer, each with its figures on one page (`bash tools/gpu_check.sh`).

Without a GPU every test is skipped, with the reason. In a rehearsal (PYTEST_GPU_REHEARSAL) the CPU stands in for the
GPU where a check makes sense on it, and the page marks what was measured that way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.page import Check, Figure, describe_machine, make_page

REHEARSAL = "PYTEST_GPU_REHEARSAL"
PAGE = "PYTEST_GPU_PAGE"
_figures: dict[str, list[Figure]] = {}
_checks: list[Check] = []

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
def note(request: pytest.FixtureRequest) -> Note:
    """Puts a figure on the page: what, value, unit, and what it should be."""

    def add(what: str, value: float, unit: str = "", goal: str = "") -> None:
        figures = _figures.setdefault(request.node.nodeid, [])
        figures.append(Figure(what, float(value), unit, goal))

    return add


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if "tests/gpu" not in item.nodeid or (report.when != "call" and report.outcome == "passed"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    title = (item.function.__doc__ or item.name).strip().splitlines()[0]  # type: ignore[attr-defined]
    kind = item.nodeid.partition("[")[2].rstrip("]")
    _checks.append(Check(f"{title} [{kind}]" if kind else title, report.outcome, reason, _figures.get(item.nodeid, [])))


def pytest_sessionfinish() -> None:
    if PAGE in os.environ:
        Path(os.environ[PAGE]).write_text(make_page(describe_machine(), _checks))
