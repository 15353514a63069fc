"""Every test sees the clone and its own temporary folder; and marks by the folder a test lies in: unit, ranks, vllm,
slurm, gpu.

What somebody's working directory, home directory or environment holds must not change a result:

- The working directory is a fresh folder of decoys, one per test (and one for fixtures that serve several).
- HOME lies below a regular file. Nothing can be read or made there, by root neither, which no mode bits achieve.
  matplotlib, Triton, vLLM, git and Slurm all have to get on with that, as on a compute node without home directories.
- Of the environment only what programs need to start is left, before the first test module is imported.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.decoys import lay_out_decoys

TESTS = Path(__file__).parent
HOME = Path(__file__) / "home"
KEPT = {
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONDONTWRITEBYTECODE",
    "LANG",
    "TZ",
    "TERM",
    "TMPDIR",
    "USER",
    "LOGNAME",
    "SHELL",
}
# What waits most comes first: with two workers the tests on the cluster wait while others compute. Short files fill the
# end.
ORDER = ("slurm", "vllm", "ranks", "gpu", "unit")
KEPT_PREFIXES = ("LC_", "PYTEST_")


def _clean_environment() -> None:
    # Programs that tests start import from `tests` too, and start elsewhere: no entry may be relative.
    others = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    gpus = os.environ.get("PYTEST_GPUS", "")  # named by tools/gpu_check.sh alone
    for name in set(os.environ) - KEPT:
        if not name.startswith(KEPT_PREFIXES):
            del os.environ[name]
    os.environ |= {
        "HOME": str(HOME),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *others]),
        "CUDA_VISIBLE_DEVICES": gpus,  # the tests compute on the CPU, also beside a GPU
    }


def _cache_of_gpu_programs() -> None:
    """FlashInfer and Triton keep what they compile below the home directory, which is none here, or where they are
    told.

    FlashInfer makes its folder while Megatron-core imports it, without a GPU too.
    """
    cache = Path(tempfile.gettempdir()) / f"tango-gpu-checks-{os.getuid()}"
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(cache)
    if os.environ["CUDA_VISIBLE_DEVICES"]:
        os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")


_clean_environment()
_cache_of_gpu_programs()
ENVIRONMENT = dict(os.environ)


@contextlib.contextmanager
def _among_decoys() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="somewhere-", ignore_cleanup_errors=True) as folder:
        lay_out_decoys(Path(folder))
        with contextlib.chdir(folder):
            yield


@pytest.fixture(scope="session", autouse=True)
def _working_directory_of_shared_fixtures() -> Iterator[None]:
    with _among_decoys():
        yield


@pytest.fixture(autouse=True)
def _working_directory(_working_directory_of_shared_fixtures: None) -> Iterator[None]:
    with _among_decoys():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(getattr(pytest.mark, _folder(item)))
    items.sort(key=lambda item: ORDER.index(_folder(item)))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two workers (`-n 2`) take files from the list, one after the other; all of tests/slurm goes to one: it has one
    cluster.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return str(Path(file).parent) if "/slurm/" in file else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
