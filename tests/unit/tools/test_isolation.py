"""The tests see nothing of the working directory, home directory and environment that they are started in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tango_hpc.base.config import load_config
from tango_hpc.base.errors import UserError
from tango_hpc.commands.profiles import load_profile, profile_folders
from tests.conftest import ENVIRONMENT
from tests.helpers.decoys import lay_out_decoys

ROOT = Path(__file__).parents[3]
STEERING = {
    "TANGO_RANK_COMMAND": "false", "TANGO_STAGE_WEIGHTS_TO": "/nowhere", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "9", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "9",
    "LOCAL_WORLD_SIZE": "9", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "nosuch0",
    "HF_HOME": "/nowhere", "VLLM_CACHE_ROOT": "/nowhere", "XDG_CACHE_HOME": "/nowhere", "MPLBACKEND": "nosuch",
    "TORCH_INDEX": "nowhere", "PIP_INDEX_URL": "nowhere",
}  # fmt: skip
# They look for a config's files, a profile by its name, a place in Slurm.
READERS = ("tests/unit/base/test_config.py", "tests/unit/runner/test_launch.py", "tests/unit/tools/test_isolation.py")


def test_the_working_directory_is_a_fresh_one_of_decoys() -> None:
    here = Path.cwd()
    assert ROOT not in (here, *here.parents)
    with pytest.raises(UserError, match="is not valid YAML"):
        load_config(Path("configs/quickstart.yaml"))
    with pytest.raises(UserError, match="is over the model's 8 positions"):
        load_config(ROOT / "configs/quickstart.yaml")  # its run directory is a relative one
    assert list(here.rglob("written")) == []
    Path("written").touch()


def test_what_another_test_wrote_here_is_gone() -> None:
    test_the_working_directory_is_a_fresh_one_of_decoys()


@pytest.fixture(scope="module")
def place_of_a_shared_fixture() -> Path:
    return Path.cwd()


def test_fixtures_of_several_tests_are_elsewhere_too(place_of_a_shared_fixture: Path) -> None:
    assert (place_of_a_shared_fixture / "runs/quickstart/models/untrained/config.json").is_file()
    assert place_of_a_shared_fixture not in (ROOT, Path.cwd())


def test_nobody_can_write_to_the_home_directory() -> None:
    assert not Path.home().exists()
    with pytest.raises(OSError):
        (Path.home() / ".config").mkdir(parents=True)
    assert profile_folders()[0].is_relative_to(Path.home())


def test_no_variable_that_steers_the_product_is_left() -> None:
    steering = ("TANGO_", "SLURM_", "SBATCH_", "HF_", "VLLM_", "XDG_", "NCCL_", "GLOO_", "PIP_", "MPL", "TORCH")
    assert [name for name in ENVIRONMENT if name.startswith(steering) or name in STEERING] == []
    # vLLM's are set by the engine where it is imported, none to what was there before.
    assert [name for name, value in STEERING.items() if os.environ.get(name) == value] == []
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    assert entries[0] == str(ROOT) and all(map(os.path.isabs, entries))


@pytest.mark.skipif("PYTEST_OF_A_STRANGER" in os.environ, reason="this is the inner one")
def test_the_tests_pass_where_a_stranger_starts_them(tmp_path: Path) -> None:
    """In the folder of a finished quick start, from somebody's home with a profile of that name, within a Slurm
    step.
    """
    here, home = tmp_path / "here", tmp_path / "home"
    lay_out_decoys(here)
    profiles = home / ".config" / "tango_hpc" / "profiles"
    profiles.mkdir(parents=True)
    for file in (ROOT / "slurm/profiles").glob("*.yaml"):
        (profiles / file.name).write_text("acount: somebody else's\n")
    env = os.environ | STEERING | {"HOME": str(home), "PYTEST_OF_A_STRANGER": "1", "PYTHONPATH": f".:{ROOT}"}
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
    words += ["--rootdir", ROOT, "-c", ROOT / "pyproject.toml", *(ROOT / reader for reader in READERS)]
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr


def test_a_profile_by_its_name_is_the_shipped_one() -> None:
    assert load_profile("generic") == load_profile(str(ROOT / "slurm/profiles/generic.yaml"))
