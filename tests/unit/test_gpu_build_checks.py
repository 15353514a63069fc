"""tools/check_gpu_build.sh without its 10 GB: which releases, what it refuses, how it tells what moved."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/check_gpu_build.sh"


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools/gpu_build"))


def start(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env=os.environ | variables, capture_output=True, text=True, check=False
    )


def checked_versions() -> list[str]:
    (line,) = re.findall(r"^supported=\((.+?)\)", SCRIPT.read_text(), re.MULTILINE)
    return line.split()


def test_every_release_that_pip_may_take_is_checked_and_stands_in_the_table() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    (allowed,) = (Requirement(line).specifier for line in extra)
    minors = [f"0.{minor}" for minor in range(20, 60) if Version(f"0.{minor}.0") in allowed]
    assert [version.rpartition(".")[0] for version in checked_versions()] == minors[::-1]
    page = (ROOT / "docs/on_your_cluster.md").read_text()
    rows = re.findall(r"^\| ([\d., to]+) \| [\d.]+ \|.*check_gpu_build", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"0\.\d+", row)}
    assert named == set(minors)


@pytest.mark.parametrize(
    "words, said",
    [
        (["0.32"], "0.32 is no version of vLLM, such as 0.32.0"),
        (["--fodler", "x"], "there is no option --fodler"),
        (["--folder"], "--folder needs a folder"),
        (["--folder", "/proc/nowhere"], "nothing can be written to /proc/nowhere"),
    ],
)
def test_bad_input_ends_with_what_to_do(words: list[str], said: str) -> None:
    done = start(*words)
    assert done.returncode == 2 and said in done.stderr


def test_a_full_disk_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    df = tmp_path / "bin/df"
    df.parent.mkdir()
    df.write_text("#!/bin/sh\nprintf 'Filesystem 1M-blocks Used Available\\n/dev/x 9 9 13999\\n'\n")
    df.chmod(0o755)
    done = start("--folder", str(tmp_path / "build"), PATH=f"{df.parent}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert f"takes 14000 MB and {tmp_path}/build has 13999 MB free; name a larger disk with --folder" in done.stderr
    assert list((tmp_path / "build").iterdir()) == []


def test_help_says_what_it_needs() -> None:
    done = start("--help")
    assert done.returncode == 0 and "14 must be free" in done.stdout and "set -e" not in done.stdout


def test_a_name_that_moved_in_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from checks import perform
    from trainer_checks import CHECKS

    (item,) = (item for item in CHECKS if item.name == "out_dtype of matrix products")
    assert perform([item]) == {item.name: "ok"}
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda input, mat2: real(input, mat2))
    (said,) = perform([item]).values()
    assert "unexpected keyword argument 'out_dtype' (at tango_hpc/policy/vocab_parallel.py:" in said
    assert said.endswith("[used by policy/vocab_parallel.py]")
    monkeypatch.setattr(torch, "mm", lambda input, mat2, *, out_dtype: real(input, mat2))
    (said,) = perform([item]).values()
    assert said.startswith(
        "torch.mm(out_dtype=torch.float32): ((8, 16), torch.bfloat16) where ((8, 16), torch.float32)"
    )


def test_the_table_marks_what_moved_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for vllm, said in (("0.32.0", "ok"), ("0.33.0", "tags: {'all'} where {'weights'} was expected [used by x.py]")):
        versions = {"vLLM": vllm, "torch": "2.13.0", "megatron-core": "0.16.1", "transformers": "5.19.0"}
        files.append(tmp_path / f"{vllm}.json")
        files[-1].write_text(json.dumps({"versions": versions, "results": {"sleep": said, "NCCL": "-"}}))
    table = runpy.run_path(str(ROOT / "tools/gpu_build/__main__.py"))["print_table"]
    assert table(files[:1]) == 0
    capsys.readouterr()
    assert table(files) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^sleep +ok +MOVED$", printed, re.MULTILINE) and re.search(r"^NCCL +- +-$", printed, re.MULTILINE)
    assert "Moved, vLLM 0.33.0, sleep:\n  tags: {'all'} where {'weights'} was expected [used by x.py]" in printed
    assert "Only a GPU can tell (tools/gpu_check.sh):\n- that kernels" in printed


def test_the_package_is_known_by_its_place_and_not_by_a_folder_of_its_name() -> None:
    """As in `git clone … && cd tango_hpc`: then tests and tools lie below a tango_hpc as well."""
    from checks import told

    from tango_hpc.stages.sharing import in_shares

    alone = SimpleNamespace(size=2, number=0, all_gather=lambda mine: [mine])
    names: dict[str, Any] = {}
    exec(compile("def moved(items): raise TypeError('gone')", "/home/me/tango_hpc/tests/moved.py", "exec"), names)
    with pytest.raises(TypeError) as caught:
        in_shares(alone, names["moved"], [1])  # type: ignore[arg-type]
    assert re.fullmatch(
        r"TypeError: gone \(at tango_hpc/stages/sharing.py:\d+, then tango_hpc/tests/moved.py:1\)", told(caught.value)
    )
