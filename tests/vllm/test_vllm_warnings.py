"""vLLM's warnings are shown on GPUs, where they name the fast paths that are off, and not on CPUs.

That the logger of an engine takes the level is a check of tools/gpu_build, which tests/vllm/test_gpu_build.py runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LEVEL = """
import sys
from tango_hpc.models.engine.engine import import_vllm
import_vllm(sys.argv[1])
from vllm import envs
print(envs.VLLM_LOGGING_LEVEL)
"""


@pytest.mark.parametrize(
    ("device", "variables", "level"),
    [("cuda", {}, "WARNING"), ("cpu", {}, "ERROR"), ("cuda", {"VLLM_LOGGING_LEVEL": "DEBUG"}, "DEBUG")],
)
def test_vllm_logs_warnings_on_gpus_unless_the_user_says_otherwise(
    device: str, variables: dict[str, str], level: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"} | variables
    words = [sys.executable, "-P", "-c", LEVEL, device]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == level
