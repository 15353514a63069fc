"""tools/check_gpu_build.sh without its 10 GB: which releases, what it refuses, how it tells what moved."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
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
    rows = re.findall(r"^\| (0\.\d+)(?:\.\d+| to 0\.(\d+))? \| 2\.\d+\.\d+ \|", page, re.MULTILINE)
    named = [
        f"0.{minor}"
        for first, last in rows
        for minor in range(int(first.removeprefix("0.")), int(last or first.removeprefix("0.")) + 1)
    ]
    assert named == minors


@pytest.mark.parametrize(
    "words, said",
    [
        (["0.32"], "0.32 is no version of vLLM, such as 0.33.0"),
        (["--fodler", "x"], "there is no option --fodler"),
        (["--folder"], "--folder needs a folder"),
        (["--folder", "/proc/nowhere"], "nothing can be written to /proc/nowhere"),
        (["--platform"], "--platform needs aarch64 or x86_64"),
        (["--platform", "arm64"], "--platform needs aarch64 or x86_64"),
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


class Uv:
    """An environment with a program in uv's place, which gives an answer that uv 0.13.9 gave."""

    RESOLVED = "torch==2.14.0\nnvidia-nccl-cu13==2.30.7\nvllm==0.33.0\n"
    NO_WHEEL = "  cause: Because tilelang==0.1.12 has no usable wheels and vllm>=0.33.0 depends on tilelang==0.1.12"
    NO_RELEASE = "  cause: Because there is no version of vllm==0.99.0"
    NO_INDEX = "  cause: tcp connect error"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "uv/bin").mkdir(parents=True)
        self._program("python", f'exec {sys.executable} "$@"')
        self._program(
            "uv",
            f"""\
            printf '%s\\n' "$UV_DEFAULT_INDEX $*" >>{folder}/calls
            while [ "$1" != --output-file ]; do shift; done
            printf '%s' "$RESOLVED" >"$2"; printf '%s\\n' "$SAID" >&2; exit "$CODE"
        """,
        )

    def _program(self, name: str, lines: str) -> None:
        (self.folder / "uv/bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
        (self.folder / "uv/bin" / name).chmod(0o755)

    def answer(
        self, code: int, said: str = "", resolved: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """What the script makes of it, for vLLM 0.33.0 on aarch64."""
        answer = {"CODE": str(code), "SAID": said, "RESOLVED": resolved, "PIP_INDEX_URL": "https://mirror/simple"}
        return start("--folder", str(self.folder), "--platform", "aarch64", "0.33.0", **answer, **variables)


def test_a_platform_is_resolved_by_wheels_alone_with_pips_index(tmp_path: Path) -> None:
    uv = Uv(tmp_path)
    done = uv.answer(0, resolved=Uv.RESOLVED)
    assert done.returncode == 0, done.stderr
    said = "vLLM 0.33.0: 3 packages have wheels for aarch64 with glibc 2.34 and Python 3.1{}, with torch==2.14.0"
    assert done.stdout.splitlines() == [said.format(minor) for minor in (1, 2, 3)]
    calls = (tmp_path / "calls").read_text().splitlines()
    for minor, call in zip((1, 2, 3), calls, strict=True):
        assert call.startswith(f"https://mirror/simple pip compile {ROOT}/pyproject.toml --extra gpu ")
        assert f"--only-binary :all: --python-platform aarch64-manylinux_2_34 --python-version 3.1{minor} " in call
    uv.answer(0, resolved=Uv.RESOLVED, GLIBC="2.31")
    assert "--python-platform aarch64-manylinux_2_31 " in (tmp_path / "calls").read_text()


def test_a_package_without_a_wheel_is_named_and_so_is_a_torch_without_cuda(tmp_path: Path) -> None:
    uv = Uv(tmp_path)
    done = uv.answer(1, Uv.NO_WHEEL)
    assert done.returncode == 1 and done.stdout == ""
    assert Uv.NO_WHEEL in done.stderr
    assert "vLLM 0.33.0 cannot be installed on aarch64 with glibc 2.34 and Python 3.12: uv names the" in done.stderr
    done = uv.answer(0, resolved="torch==2.14.0\nvllm==0.33.0\n")
    assert done.returncode == 1 and "is a build without CUDA (torch==2.14.0)" in done.stderr


@pytest.mark.parametrize(("code", "said"), [(1, Uv.NO_RELEASE), (2, Uv.NO_INDEX)])
def test_what_uv_could_not_look_up_is_no_missing_wheel(tmp_path: Path, code: int, said: str) -> None:
    done = Uv(tmp_path).answer(code, said)
    assert done.returncode == 2 and said in done.stderr
    assert "Cannot check: uv could not resolve vLLM 0.33.0 for aarch64" in done.stderr


def test_glibc_is_a_version_that_uv_knows() -> None:
    done = start("--platform", "aarch64", GLIBC="2.29")
    assert done.returncode == 2 and "GLIBC=2.29 is none of 2.17, 2.28, 2.31 to 2.40" in done.stderr


def test_a_name_that_moved_in_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from checks import perform
    from trainer_checks import CHECKS

    (item,) = (item for item in CHECKS if item.name == "out_dtype of matrix products")
    assert perform([item]) == {item.name: "ok"}
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda input, mat2: real(input, mat2))
    (said,) = perform([item]).values()
    assert "unexpected keyword argument 'out_dtype' (at tango_hpc/models/trainer/vocab_parallel.py:" in said
    assert said.endswith("[used by models/trainer/vocab_parallel.py]")
    monkeypatch.setattr(torch, "mm", lambda input, mat2, *, out_dtype: real(input, mat2))
    (said,) = perform([item]).values()
    assert said.startswith(
        "torch.mm(out_dtype=torch.float32): ((8, 16), torch.bfloat16) where ((8, 16), torch.float32)"
    )


def test_attention_takes_the_varlen_attn_of_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no enable_gqa, and takes grouped heads."""
    from checks import perform
    from torch.nn.attention import varlen
    from trainer_checks import CHECKS

    from tango_hpc.models.trainer import attention

    real = varlen.varlen_attn

    def of_torch_2_11(*inputs: Any, return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1)) -> Any:
        return real(*inputs, return_aux=return_aux, scale=scale, window_size=window_size, enable_gqa=True)

    (item,) = (item for item in CHECKS if item.name == "varlen_attn")
    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_11)
    attention._varlen_has_enable_gqa.cache_clear()
    try:
        assert perform([item]) == {item.name: "ok"}
    finally:
        attention._varlen_has_enable_gqa.cache_clear()


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
