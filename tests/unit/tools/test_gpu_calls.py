"""Several calls of `tools/gpu_check.sh`: what each runs, what a crash and the end of the time leave, and its wheels.

The real runner with small checks of its own in place of those of tests/gpu.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.gpu.state import is_settled, outcome_of_cut
from tests.gpu.wheels import WheelError, find_missing, how_to_bring, unpack_wheels

ROOT = Path(__file__).parents[3]
CHECKS = {
    "test_4_wheel.py": "SECONDS = 1\ndef test():\n    'Part 4: wheel.'\n    import able_too\n",
    "test_1_fine.py": "SECONDS = 1\ndef test(note):\n    'Part 1: fine.'\n    note('speed', 5.0, 'tokens/s')\n",
    "test_2_crash.py": (
        "SECONDS = 1\nimport os, sys\ndef test():\n    'Part 2: crash.'\n"
        "    if not os.path.exists(os.environ['PYTEST_MENDED']):\n"
        "        print('NCCL WARN gone', file=sys.stderr, flush=True)\n        os.abort()\n"
    ),
    "test_3_after.py": "SECONDS = 1\ndef test():\n    'Part 3: after the crash.'\n",
    "test_5_long.py": "SECONDS = 1000\ndef test():\n    'Part 5: long.'\n",
    "test_7_endless.py": "SECONDS = 1\nimport time\ndef test():\n    'Part 7: endless.'\n    time.sleep(1000)\n",
}

SELECTED = "not endless and not wheel"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the runner and these checks."""
    folder = tmp_path / "clone/tests/gpu"
    folder.mkdir(parents=True)
    for name in ("__init__", "__main__", "conftest", "page", "state", "wheels"):
        shutil.copy(ROOT / f"tests/gpu/{name}.py", folder)
    for name, text in CHECKS.items():
        (folder / name).write_text(text)
    (folder.parent / "__init__.py").touch()
    (tmp_path / "clone/pyproject.toml").write_text("[project]\ndependencies = []\n[tool.pytest.ini_options]\n")
    (tmp_path / "clone/tools").mkdir()
    shutil.copy(ROOT / "tools/gpu_check.sh", tmp_path / "clone/tools")
    return tmp_path / "clone"


def check(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTEST_MENDED": str(clone / "mended")}
    command = ["bash", str(clone / "tools/gpu_check.sh"), str(clone / "out"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_page_grows_over_calls_and_a_crash_takes_one_check_along(clone: Path) -> None:
    page = clone / "out/gpu_check.md"
    first = check(clone, "-k", SELECTED)
    assert first.returncode == 1, first.stdout + first.stderr
    lines = [line.partition(" (")[0] for line in first.stdout.splitlines()[-4:-1]]
    assert lines == ["Part 1: fine: passed", "Part 2: crash: failed", "Part 3: after the crash: passed"]
    assert "2 passed, 1 failed, 0 not run, 1 left for a next call." in page.read_text()
    assert "| Part 1: fine | passed | speed 5 tokens/s | 1 |" in page.read_text()
    failure = page.read_text().partition("## Part 2: crash")[2]
    assert "the process of the checks ended with signal SIGABRT" in failure and "NCCL WARN gone" in failure

    assert "Part" not in check(clone, "-k", SELECTED).stdout  # nothing is left that fits nine minutes
    (clone / "mended").touch()
    third = check(clone, "--again", "failed", "--again", "3", "--minutes", "20", "-k", SELECTED)
    assert third.returncode == 0, third.stdout + third.stderr
    assert [line.partition(":")[0] for line in third.stdout.splitlines()[:-1] if "Part" in line] == [
        "Part 2", "Part 3", "Part 5",
    ]  # fmt: skip
    assert "4 passed, 0 failed, 0 not run.\n" in page.read_text()


def test_a_call_ends_in_time(clone: Path) -> None:
    called = check(clone, "-k", "endless or fine", "--minutes", "0.7")
    assert called.returncode == 0, called.stdout + called.stderr
    assert "Part 7: endless: cut off" in called.stdout
    page = (clone / "out/gpu_check.md").read_text()
    assert "1 passed, 0 failed, 0 not run, 1 left for a next call." in page
    assert "| Part 7: endless | cut off | the time of the call was over after " in page


def test_what_did_not_run_or_was_cut_off_runs_in_the_next_call() -> None:
    def ended(*outcomes: str) -> list[dict[str, object]]:
        return [
            {"call": number, "end": "tests/gpu/test_5_speed.py::a", "outcome": outcome}
            for number, outcome in enumerate(outcomes, 1)
        ]

    assert [is_settled(ended(one), 2, []) for one in ("passed", "failed", "skipped", "cut")] == [
        True,
        True,
        False,
        False,
    ]
    assert not is_settled([], 1, []) and is_settled(ended("skipped"), 1, [])
    assert not is_settled(ended("failed"), 2, ["failed"]) and is_settled(ended("passed"), 2, ["failed", "4"])
    assert not is_settled(ended("passed"), 2, ["5"]) and is_settled(ended("passed"), 1, ["5"])
    assert outcome_of_cut([]) == outcome_of_cut(ended("passed")) == "cut" and outcome_of_cut(ended("cut")) == "failed"


def make_wheel(folder: Path, name: str, tag: str = "py3-none-any", needs: str = "", filling: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n{needs}")
        file.writestr(f"shared_by_{name[0]}/{name}.py", "#" * filling)
        file.writestr(f"{name}-1.0.data/purelib/{name}_too.py", "")
        file.writestr(f"{name}-1.0.data/scripts/{name}", "")
    return wheel


def cut(wheel: Path, size: int) -> list[Path]:
    data = wheel.read_bytes()
    wheel.unlink()
    pieces = [wheel.with_name(f"{wheel.name}.part{at // size:02d}") for at in range(0, len(data), size)]
    for number, piece in enumerate(pieces):
        piece.write_bytes(data[number * size : (number + 1) * size])
    return pieces


def test_wheels_come_whole_or_in_pieces_one_call_after_the_other(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    make_wheel(wheels, "able")
    pieces = cut(make_wheel(wheels, "ample", filling=5000), 2000)
    assert len(pieces) == 3
    make_wheel(wheels, "pytest")  # the environment has it
    make_wheel(wheels, "alien", "cp27-none-win32")
    kept = pieces[-1].read_bytes()
    pieces[-1].unlink()
    for number in (1, 2):  # a second call says the same
        said = unpack_wheels(wheels, site)
        assert sorted(said) == [
            "alien-1.0-cp27-none-win32.whl is for another Python or platform",
            "ample-1.0-py3-none-any.whl is not whole: there are pieces 0, 1",
        ], number
    (wheels / "later").mkdir()
    (wheels / "later" / pieces[-1].name).write_bytes(kept)
    (site / "shared_by_a/able.py").write_text("unpacked once")
    assert [line.partition("-")[0] for line in unpack_wheels(wheels, site)] == ["alien"]
    assert (site / "shared_by_a/able.py").read_text() == "unpacked once"
    assert (site / "shared_by_a/ample.py").read_text() == "#" * 5000 and (site / "ample_too.py").exists()
    assert not list(site.glob("**/pytest*")) and not (site / "joined.whl").exists()


def test_what_the_wheels_bring_is_there_in_the_same_call(clone: Path) -> None:
    assert check(clone, "-k", "wheel").returncode == 1
    make_wheel(clone / "wheels", "able")
    called = check(clone, "-k", "wheel", "--wheels", str(clone / "wheels"), "--again", "failed")
    assert called.returncode == 0 and "Part 4: wheel: passed" in called.stdout, called.stdout + called.stderr
    wrong = check(clone, "--wheels", str(clone / "none"))
    assert wrong.returncode == 2 and wrong.stderr == f"no folder {clone}/none\n"


def test_wheels_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="no folder"):
        unpack_wheels(tmp_path / "none", tmp_path / "site")
    make_wheel(tmp_path / "wheels", "able").rename(tmp_path / "wheels/able-2.0-py3-none-any.whl")
    make_wheel(tmp_path / "wheels", "able")
    with pytest.raises(WheelError, match=r"two wheels of one package; keep one: able-1.0\S+, able-2.0"):
        unpack_wheels(tmp_path / "wheels", tmp_path / "site")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WheelError, match="there is no wheel in"):
        unpack_wheels(tmp_path / "empty", tmp_path / "site")


def test_what_is_missing_is_found_through_what_is_there(tmp_path: Path) -> None:
    needs = "Requires-Dist: no-such-one>=2\nRequires-Dist: pytest\nRequires-Dist: nor-this; extra == 'more'\n"
    make_wheel(tmp_path / "wheels", "able", needs=needs + "Requires-Dist: nor-that; python_version < '3'\n")
    unpack_wheels(tmp_path / "wheels", tmp_path / "site")
    assert find_missing(["able", "pytest"], tmp_path / "site") == ["no-such-one>=2"]
    assert find_missing(["able[more]", "absent"], tmp_path / "site") == ["absent", "no-such-one>=2", "nor-this"]
    assert find_missing([f"tango_hpc=={metadata.version('tango_hpc')}"], tmp_path / "site") == []
    said = how_to_bring(["no-such-one>=2"], tmp_path)
    assert f"--python-version 3.{sys.version_info.minor} --dest {tmp_path} 'no-such-one>=2'" in said
    assert said.startswith("export PIP_PLATFORM='") and " any'" in said.splitlines()[0]


def test_collecting_the_checks_imports_nothing_that_may_start_cuda() -> None:
    program = (
        "import sys, pytest; pytest.main(['--collect-only', '-q', sys.argv[1]]); print(sorted({'megatron', 'vllm',"
        " 'flashinfer'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", program, str(ROOT / "tests/gpu")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert " tests collected" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stdout[-2000:]
